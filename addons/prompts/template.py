"""The tokens of new messages where a renderer does not give them: they follow a placeholder of the sampled turn.

`TemplateContinuation` is for chat templates that no renderer knows. The template renders a placeholder conversation of
one user message, one assistant message and the new messages. The text from the end of the assistant's turn on is
encoded and appended. The real conversation is not rendered again. This is correct for templates that write new messages
independently of those before, which is checked on a few probe conversations before anything is recorded.

`tokens_of_turns` is for new messages among which are turns of the assistant that no call sampled. Renderers continue a
sampled turn only with messages of others. The tokens are therefore taken from a full prompt of a placeholder turn and
the new messages: those after the placeholder. They are used only when the renderer ends the placeholder as it ends the
sampled turn, which is seen from what it writes after both for the same message.
"""

from collections.abc import Callable, Collection
from itertools import takewhile
from typing import Any

from rolltap.addons.dialects.call import Message, Tool, assistant_message, message_tool_call
from rolltap.addons.dialects.dialect import name_results
from rolltap.addons.dialects.tools import function_tool

USER: Message = {"role": "user", "content": "Hello"}
"""The message that is written after the sampled turn and after the placeholder."""
PLACEHOLDER = "a8c1f0e7"
"""The text of the placeholder."""


def placeholder_turn(text: str, messages: list[Message]) -> Message:
    """Return an assistant message of `text` with the tool calls that results in `messages` answer.

    Results after another assistant message answer that one.
    """
    first = takewhile(lambda message: message["role"] != "assistant", messages)
    results = (message for message in first if message["role"] == "tool")
    calls = [message_tool_call(result["tool_call_id"], result.get("name", ""), {}) for result in results]
    return assistant_message(text, "", calls)


def tokens_of_turns(
    after_turn: list[int],
    ended: bool,
    messages: list[Message],
    render: Callable[[list[Message]], list[int]],
    placeholder_ids: list[int],
    stop_ids: Collection[int],
) -> list[int] | None:
    """Return the ids that follow a sampled turn: its end unless `ended`, `messages` and the generation prompt.

    `after_turn` are the ids that the renderer writes after the sampled turn for the message `USER`. `ended` is True
    when the turn was sampled with its stop token. `render` returns the ids of a full prompt, `placeholder_ids` are
    those of `PLACEHOLDER`. Returns None when `render` refuses the messages, and when it ends the placeholder otherwise
    for them than for `USER`. What it writes before the placeholder, such as an empty reasoning, may differ.
    """
    ending = 0 if ended else next((i + 1 for i, token in enumerate(after_turn) if token in stop_ids), 0)
    after_stop = after_turn[ending:]
    before = [USER, placeholder_turn(PLACEHOLDER, messages)]
    try:
        compared, whole = render([*before, USER]), render([*before, *messages])
    except Exception:
        return None  # templates raise for messages that they do not support
    end = len(compared) - len(after_stop)
    start, begin = _find(placeholder_ids, compared[:end]), _find(placeholder_ids, whole)
    if start is None or begin is None or compared[end:] != after_stop or compared[end - 1] not in stop_ids:
        return None
    turn = compared[start:end]
    follows = begin + len(turn)
    return after_turn[:ending] + whole[follows:] if whole[begin:follows] == turn else None


def _find(part: list[int], ids: list[int]) -> int | None:
    return next((i for i in range(len(ids) - len(part) + 1) if ids[i : i + len(part)] == part), None)


_WHERE = {"type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]}
PROBE_TOOLS: list[Tool] = [function_tool("look", "Looks.", _WHERE), function_tool("listen", "Listens.", _WHERE)]
_LAST_WORD, _SECOND = "door", "far"
_WHERES = {"look": f"é {_LAST_WORD}", "listen": f"{_SECOND} {_LAST_WORD}"}
_CALLS = [message_tool_call(f"c{i}", name, {"where": where}) for i, (name, where) in enumerate(_WHERES.items())]
_RESULTS: list[Message] = [
    {"role": "tool", "content": "Nothing.", "tool_call_id": "c0"},
    {"role": "tool", "content": "Steps.", "tool_call_id": "c1"},
]
PROBE: list[Message] = name_results(
    [
        {"role": "user", "content": "Look."},
        assistant_message("", "", _CALLS[:1]),
        *_RESULTS[:1],
        {"role": "assistant", "content": f"There is no {_LAST_WORD}"},
        {"role": "user", "content": "Look again."},
    ]
)
PARALLEL_PROBE: list[Message] = name_results(
    [{"role": "user", "content": "Look."}, assistant_message("", "", _CALLS), *_RESULTS]
)
"""Several calls in one turn, which some templates refuse. Messages are in the form in which dialects decode them."""
_PARALLEL_TURN = PARALLEL_PROBE[:2], PARALLEL_PROBE[2:]
_LATER_TURN = [*PROBE, *PROBE[:2]], PROBE[2:]
"""New messages with an assistant message, later in the conversation than the placeholder is."""


class TemplateContinuation:
    """Token ids of new messages from a tokenizer's own chat template.

    `ends` are the ids of the tokens that end a sampled turn; `past_end` is that of the token which the template may
    write in their place when the turn is over. `refusal` is the reason for which this template cannot be used, or None.
    """

    def __init__(self, tokenizer: Any, ends: list[int], past_end: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = set(ends)
        self._ends = {*ends} if past_end is None else {*ends, past_end}
        self._past_end = past_end
        self._end_texts = [tokenizer.decode([end]) for end in self._ends]
        self.refusal = self._probe([(PROBE[:2], PROBE[2:3]), (PROBE[:4], PROBE[4:]), _PARALLEL_TURN])
        self._takes_turns = self.refusal is None and self._probe([_LATER_TURN]) is None
        """True when new messages may include assistant messages."""

    def extension(self, completion_ids: list[int], messages: list[Message]) -> list[int] | None:
        """Return the token ids that follow a completion.

        These are the end of the turn, unless the completion has one, the new messages and the generation prompt.
        Returns None when the template cannot render these messages after an assistant message, and when it ends a turn
        before them otherwise than the completion.
        """
        if self.refusal or (not self._takes_turns and any(message["role"] == "assistant" for message in messages)):
            return None
        found = self._after_turn(messages)
        if found is None:
            return None
        ids: list[int] = self._tokenizer.encode(found[1], add_special_tokens=False)
        sampled = completion_ids[-1] if completion_ids else None
        if sampled not in self._stop_ids:
            return ids
        return ids[1:] if ids[0] in (sampled, self._past_end) else None

    def _after_turn(self, messages: list[Message]) -> tuple[str, str] | None:
        """Return what the template writes after the last value of a turn: up to the turn's end, and from it on."""
        try:
            text = self._text([USER, _stand_in(messages), *messages], [], generation=True)
        except Exception:
            return None  # templates raise for messages that they do not support
        after = text.partition(PLACEHOLDER)[2]
        ends = [place for place in map(after.find, self._end_texts) if place >= 0]
        return (after[: min(ends)], after[min(ends) :]) if ends else None

    def _probe(self, turns: list[tuple[list[Message], list[Message]]]) -> str | None:
        """Return the reason for which the template cannot be used, or None when it renders the turns as required.

        It may render earlier turns differently when later ones follow: the sampled tokens stay. The new messages, and
        how the turn before them is closed, must not depend on what is before.
        """
        for tools in ([], PROBE_TOOLS):
            for before, new in turns:
                parallel = before[0] is PARALLEL_PROBE[0]
                try:
                    whole = self._text([*before, *new], tools, generation=True)
                    last = self._text(before, tools, generation=False)
                except Exception as error:
                    if parallel:
                        continue  # refused in full prompts too
                    return f"the chat template refuses a conversation with tools: {error}"
                if before[-1].get("tool_calls") and (_SECOND if parallel else _LAST_WORD) not in last:
                    continue  # it writes no calls, or one of a turn: results are not continued
                found = self._after_turn(new)
                if found is None:
                    return "the chat template does not end an assistant's turn with a stop token"
                closing, extension = found
                if self._tokenizer.encode(extension, add_special_tokens=False)[0] not in self._ends:
                    return "the stop token that ends an assistant's turn is no token of its own"
                if not whole.endswith(_LAST_WORD + closing + extension):
                    return "the chat template writes new messages differently after other ones"
                end = last.rpartition(_LAST_WORD + closing)[2]
                if end == last or (end and not end.startswith(tuple(self._end_texts))):
                    return "the chat template closes a turn differently when messages follow"
        return None

    def _text(self, messages: list[Message], tools: list[Tool], *, generation: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=generation, tokenize=False
        )
        return text


def _stand_in(messages: list[Message]) -> Message:
    """Return a turn before the new messages, whose last value is `PLACEHOLDER`."""
    turn = placeholder_turn(PLACEHOLDER, messages)
    if calls := turn.get("tool_calls"):
        turn["content"], calls[-1]["function"]["arguments"] = "", {"value": PLACEHOLDER}
    return turn
