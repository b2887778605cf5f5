"""The tokens of new messages among which are turns of the assistant that no call sampled.

Renderers continue a sampled turn only with messages of others. The tokens are therefore taken from a full prompt of a
placeholder turn and the new messages: those after the placeholder. They are used only when the renderer ends the
placeholder as it ends the sampled turn, which is seen from what it writes after both for the same message.
"""

from collections.abc import Callable, Collection
from itertools import takewhile

from rolltap.addons.dialects.types import Message, assistant_message, message_tool_call

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
