"""The tokens of new messages where a renderer does not give them: they follow a placeholder.

A placeholder conversation has one user message, one assistant message, whose last value is the
placeholder, and the new messages. The tokens from the end of the assistant's turn on follow the
sampled turn too. The real conversation is not rendered again.

`TemplateContinuation` is for chat templates that no renderer knows. It is correct for templates
that write new messages independently of those before, which is checked on a few probe conversations
before anything is recorded.

`tokens_of_turns` is for new messages among which are turns of the assistant that no call sampled.
Renderers continue a sampled turn only with messages of others. The tokens are used only when the
renderer ends the placeholder as it ends the sampled turn, which is seen from what it writes after
both for the same message.
"""

from collections.abc import Callable, Collection
from typing import Any

from rolltap.addons.dialects.call import Message, Tool, assistant_message, message_tool_call
from rolltap.addons.prompts.probes import TOOLS, TURNS, USER, answered
from rolltap.addons.prompts.tokenizer import BREAK

_TEXT = "a8c1f0e7"
PLACEHOLDER = f"{BREAK}{_TEXT}{BREAK}"
"""The text of the placeholder, whose tokens are its own."""

Render = Callable[[list[Message], list[Tool], bool], list[int]]
"""Messages, tools, True for a generation prompt -> token ids. It raises for some messages."""
Encode = Callable[[str], list[int]]


def placeholder_turn(messages: list[Message]) -> Message:
    """Return the turn before new messages, whose last value is the placeholder.

    It has the tool calls that results in `messages` answer. Results after another assistant message
    answer that one.
    """
    calls: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "assistant":
            break
        if message["role"] == "tool":
            name = message.get("name", "")
            calls.append(message_tool_call(message["tool_call_id"], name, {}))
    if not calls:
        return assistant_message(PLACEHOLDER, "", [])
    calls[-1]["function"]["arguments"] = {"value": PLACEHOLDER}
    return assistant_message("", "", calls)


class Placeholder:
    """The ids that a renderer writes after the placeholder. `ends` may end a turn."""

    def __init__(self, render: Render, encode: Encode, ends: Collection[int]) -> None:
        self._render = render
        self._ids = encode(_TEXT)
        self._ends = ends

    def after(
        self,
        messages: list[Message],
        tools: list[Tool],
        *,
        generation: bool = True,
    ) -> list[int]:
        """Return the ids after the placeholder, none without one. Raises what the renderer does."""
        ids = self._render(messages, tools, generation)
        length = len(self._ids)
        for start in range(len(ids)):
            if ids[start : start + length] == self._ids:
                return ids[start + length :]
        return []

    def after_turn(
        self,
        turn: Message,
        messages: list[Message],
        tools: list[Tool],
    ) -> tuple[list[int], list[int]] | None:
        """Return the ids after the placeholder up to the end of its turn, and those after that.

        Returns None when the renderer refuses the messages, or ends no turn.
        """
        try:
            ids = self.after([USER, turn, *messages], tools)
        except Exception:
            return None  # templates raise for messages that they do not support
        for index, token_id in enumerate(ids):
            if token_id in self._ends:
                return ids[: index + 1], ids[index + 1 :]
        return None


def tokens_of_turns(
    placeholder: Placeholder,
    after_user: list[int],
    ended: bool,
    messages: list[Message],
    tools: list[Tool],
) -> list[int] | None:
    """Return the ids after a sampled turn: its end unless `ended`, messages, generation prompt.

    `after_user` are the ids that the renderer writes after the sampled turn for the message `USER`.
    `ended` is True when the turn was sampled with its stop token. Returns None when the renderer
    refuses the messages, and when it ends the placeholder otherwise for them than for `USER`. What
    it writes before the placeholder, such as an empty reasoning, may differ.
    """
    turn = placeholder_turn(messages)
    compared = placeholder.after_turn(turn, [USER], tools)
    whole = placeholder.after_turn(turn, messages, tools)
    if compared is None or whole is None or compared[0] != whole[0]:
        return None
    end = len(after_user) - len(compared[1])
    if after_user[end:] != compared[1] or (end == 0) != ended:
        return None
    return after_user[:end] + whole[1]


_ONE = answered(TURNS["one call"])
_TWO = answered(TURNS["two calls"])


class TemplateContinuation:
    """Token ids of new messages from a tokenizer's own chat template.

    `stop_ids` end a sampled turn; `past_end` is the one that the template may write in their place
    when the turn is over. `refusal` is the reason for which this template cannot be used, or None.
    """

    def __init__(
        self,
        render: Render,
        encode: Encode,
        stop_ids: list[int],
        past_end: list[int],
    ) -> None:
        self._ends = {*stop_ids, *past_end}
        self._placeholder = Placeholder(render, encode, self._ends)
        self._stop_ids = stop_ids
        self._past_end = past_end
        self.refusal = None
        for earlier, new in (([USER], _ONE[2:]), (_ONE, [USER]), ([USER], _TWO[2:])):
            self.refusal = self.refusal or self._probe(earlier, new)
        # later in the conversation than the placeholder is
        later = [*_ONE, TURNS["text"], USER, USER]
        new = [*_ONE[2:], TURNS["text"], USER]
        self._takes_turns = self._probe(later, new) is None
        """True when new messages may include assistant messages."""

    def extension(self, completion_ids: list[int], messages: list[Message]) -> list[int] | None:
        """Return the token ids that follow a completion.

        These are the end of the turn, unless the completion has one, the new messages and the
        generation prompt. Returns None when the template cannot render these messages after an
        assistant message, and when it ends a turn before them otherwise than the completion.
        """
        if self.refusal is not None:
            return None
        if not self._takes_turns and any(message["role"] == "assistant" for message in messages):
            return None
        found = self._placeholder.after_turn(placeholder_turn(messages), messages, [])
        if found is None:
            return None
        end = found[0][-1]
        following = found[1]
        sampled = completion_ids[-1:]
        if not set(sampled) & set(self._stop_ids):
            return [end, *following]
        if end in (*sampled, *self._past_end):
            return following
        return None

    def _probe(self, earlier: list[Message], new: list[Message]) -> str | None:
        """Return the reason for which the template cannot be used, or None.

        It may render earlier turns differently when later ones follow: the sampled tokens stay. The
        new messages, and how the turn before them is closed, must not depend on what is before.
        """
        turn = placeholder_turn(new)
        before = [*earlier, turn]
        for tools in ([], TOOLS):
            try:
                last = self._placeholder.after(before, tools, generation=False)
                whole = self._placeholder.after([*before, *new], tools)
            except Exception as error:
                if new == _TWO[2:]:
                    continue  # refused in full prompts too
                return f"the chat template refuses a conversation with tools: {error}"
            if not whole and turn.get("tool_calls"):
                continue  # it writes no calls, or one of a turn: results are not continued
            found = self._placeholder.after_turn(turn, new, [])
            if found is None:
                return "the chat template does not end an assistant's turn with a stop token"
            closing, following = found
            if whole != closing + following:
                return "the chat template writes new messages differently after other ones"
            *inner, _ = closing
            end = last[len(inner) :]
            if last[: len(inner)] != inner or not self._ends.issuperset(end[:1]):
                return "the chat template closes a turn differently when messages follow"
        return None
