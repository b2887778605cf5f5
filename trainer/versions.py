"""Names of the weights that a training publishes: `<run>.<step>.<attempt>`."""

import re
from dataclasses import dataclass
from typing import Self

_FORM = re.compile(r"([0-9a-f]{8})\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)")


@dataclass(frozen=True, slots=True)
class Version:
    """Name of the weights of one training; `str` gives its text form. No other weights have the same name.

    Attributes:
        run: 8 hexadecimal characters, drawn once for a run folder.
        step: Number of optimizer steps that made the weights.
        attempt: Number of earlier starts of the training.
    """

    run: str
    step: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.run}.{self.step}.{self.attempt}"

    def same_weights(self, text: str) -> bool:
        """Return True for a name of the weights after this step of this run, whatever the attempt."""
        other = self.parse(text)
        return other is not None and (other.run, other.step) == (self.run, self.step)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the version of a text; None for a name of another form, such as vLLM's `default`."""
        found = _FORM.fullmatch(text)
        return cls(found[1], int(found[2]), int(found[3])) if found else None
