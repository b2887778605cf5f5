"""A recorded call as later calls continue it."""

from array import array
from dataclasses import dataclass

import numpy as np

from rolltap.addons.dialects.types import Message
from rolltap.addons.prompts.echoes import echoed_reasoning


@dataclass(slots=True)
class Turn:
    """A recorded call of a conversation.

    Its prompt begins with the first `shared` tokens of the prompt and completion of `base`. Only the tokens after them
    are stored, so that memory grows linearly with a conversation, also when its calls are rendered.
    """

    call_id: str
    base: "Turn | None"
    """The parent of a bridged call; for a rendered one, the call whose conversation has the most messages in common."""
    shared: int
    tail_ids: "array[int]"
    completion_ids: "array[int]"
    reasoning: str
    digest: bytes
    """Digest of the call's conversation and reply."""

    @property
    def length(self) -> int:
        """The number of tokens of the prompt and the completion."""
        return self.shared + len(self.tail_ids) + len(self.completion_ids)

    def prompt_ids(self) -> list[int]:
        """Return the full prompt of the call, in O(length of the prompt + number of turns below it)."""
        return self._ids(self.length - len(self.completion_ids)).tolist()

    def _ids(self, needed: int) -> "array[int]":
        """Return the first `needed` tokens of the prompt and the completion."""
        pieces: list[array[int]] = []
        turn: Turn | None = self
        while turn is not None:
            pieces.append((turn.tail_ids + turn.completion_ids)[: max(0, needed - turn.shared)])
            needed, turn = min(needed, turn.shared), turn.base
        joined = array("i")
        for piece in reversed(pieces):
            joined += piece
        return joined

    def common_length(self, prompt_ids: "array[int]") -> int:
        """Return how many leading tokens the prompt and completion have in common with another prompt."""
        length = min(self.length, len(prompt_ids))
        ours, theirs = (np.frombuffer(ids, np.int32)[:length] for ids in (self._ids(length), prompt_ids))
        return int(different[0]) if len(different := np.flatnonzero(ours != theirs)) else length


def pick_turn(turns: list[Turn], echoed: Message) -> Turn | None:
    """Return the turn that issued the echoed reply, or None when that is ambiguous.

    `turns` have the same canonical conversation and reply. Turns with equal token ids count as the same turn.
    """
    if len(turns) > 1 and (issued := [turn for turn in turns if turn.call_id == echoed.get("call_id")]):
        return issued[0]
    if len(turns) > 1:
        turns = [turn for turn in turns if turn.reasoning == echoed_reasoning(echoed)]
    if not turns:
        return None
    first = turns[0]
    if any(t.completion_ids != first.completion_ids or t.prompt_ids() != first.prompt_ids() for t in turns[1:]):
        return None
    return first
