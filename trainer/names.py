"""Names as they are written to files and for others: file names of ids, models, published weights,
and sessions."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path, PurePath
from typing import Self
from urllib.parse import quote

MOST_CHARACTERS = 200
"""Maximum length of a name. File systems allow 255 bytes, and callers append a suffix."""


def file_name(text: str) -> str:
    """Return the file name, without a suffix, of an id: percent-encoded, and different for
    different `text`.

    A name over `MOST_CHARACTERS` is truncated, and a 128-bit hash of `text` appended.
    """
    name = quote(text, safe="")
    if name.startswith("."):
        name = "%2E" + name[1:]
    if len(name) > MOST_CHARACTERS:
        digest = blake2b(text.encode(), digest_size=16).hexdigest()
        name = f"{name[: MOST_CHARACTERS - len(digest) - 1]}-{digest}"
    return name


def some(names: Sequence[str], most: int = 5, *, of: int = 0) -> str:
    """Return the first `most` names as text, and how many more there are; of `of` ones, if these
    are more."""
    first = names[:most]
    text = ", ".join(first)
    more = max(of, len(names)) - len(first)
    if more:
        text += f" and {more} more"
    return text


def counted(number: int, name: str) -> str:
    """Return a number of things by the name of one: `1 call`, `2 calls`."""
    if number == 1:
        return f"1 {name}"
    return f"{number:,} {name}s"


_CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/[0-9a-f]+/?")
"""The end of a model's folder in the cache of huggingface_hub: owner and name."""


def public_model(model: str) -> str:
    """Return a model's name on the Hub, or the last part of a folder's path: the rest would
    disclose local names.

    A folder in the cache of huggingface_hub is known by its path.
    """
    cached = _CACHED.search(model)
    if cached is not None:
        return f"{cached[1]}/{cached[2]}"
    is_name = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model) is not None
    if is_name and not Path(model).exists():
        return model
    return PurePath(model).name


_FORM = re.compile(r"([0-9a-f]{8})\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)")


@dataclass(frozen=True, slots=True)
class Version:
    """Name of the weights of one training; `str` gives its text form. No other weights have the
    same name.

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

    def age(self, text: str) -> int | None:
        """Return how many steps older the weights of a name are, whatever the attempt; None for
        another run's."""
        other = self.parse(text)
        if other is None or other.run != self.run:
            return None
        return self.step - other.step

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the version of a text; None for a name of another form, such as vLLM's
        `default`."""
        found = _FORM.fullmatch(text)
        if found is None:
            return None
        return cls(found[1], int(found[2]), int(found[3]))


_ATTEMPT = re.compile(r"(.*?)(?:~([1-9][0-9]*))?", re.DOTALL)
_SEAT = re.compile(r"(.+)-([0-9]+)(?:\.([0-9]+))?")


@dataclass(frozen=True, slots=True)
class Seat:
    """A session's seat in the group that it was run in. Its row may name another group since
    somebody changed it.

    Attributes:
        group_id: Id of the group.
        index: Index in the group, from 0.
        start: Number of earlier starts of the training that ran the session; None outside of a
            training.
    """

    group_id: str
    index: int
    start: int | None


@dataclass(frozen=True, slots=True)
class SessionName:
    """Id of a session of a group; `str` gives the id. No other code reads an id.

    | id | session |
    | --- | --- |
    | `<group>-<index>` | of a rollout |
    | `<group>-<index>.<start>` | of a training |
    | `<group>-<name>` | of a service: its client chose the name |
    | `<place>~<attempt>` | another attempt at a session; the place is the id of the first one |

    Attributes:
        place: Id of the first attempt.
        attempt: Number of earlier attempts.
    """

    place: str
    attempt: int = 0

    def __str__(self) -> str:
        if self.attempt == 0:
            return self.place
        return f"{self.place}~{self.attempt}"

    @classmethod
    def parse(cls, session_id: str) -> Self:
        """Return the name of an id. Each text is one."""
        found = _ATTEMPT.fullmatch(session_id)
        assert found is not None
        if found[2] is None:
            return cls(session_id)
        return cls(found[1], int(found[2]))

    @property
    def next(self) -> Self:
        """Name of the next attempt."""
        return type(self)(self.place, self.attempt + 1)

    @property
    def seat(self) -> Seat | None:
        """Seat of the session; None when the id has no index."""
        found = _SEAT.fullmatch(self.place)
        if found is None:
            return None
        start = None
        if found[3] is not None:
            start = int(found[3])
        return Seat(found[1], int(found[2]), start)
