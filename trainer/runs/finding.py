"""A finding of a verification, and checks that several tables share."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from rolltap.addons.store.records import Call, Session

Grade = Literal["damage", "repair", "notice"]
"""`damage`: rows are lost, were changed, or break an invariant. `repair`: `--repair` removes it, and no row with it.
`notice`: unusual, but no row is damaged."""

FROM_A_COPY = "restore the file from a copy of the run if there is one; the other rows can be used"
SALVAGE = "restore the file from a copy of the run, or save the other rows with `rolltap merge RUN --out NEW`"


@dataclass(frozen=True, slots=True)
class Finding:
    """One deviation from a sound run."""

    grade: Grade
    where: str
    """File name and byte offset, or session id and call id."""
    what: str
    advice: str = ""


def check_values(where: str, row: Call | Session, **known: Sequence[str]) -> Iterator[Finding]:
    """Yield a finding for each named column of a row whose value is not one of the known ones."""
    for name, values in known.items():
        if (value := getattr(row, name)) not in values:
            yield Finding("damage", where, f"its {name} is {value!r}", FROM_A_COPY)


def check_times(where: str, *times: datetime | None) -> Iterator[Finding]:
    """Yield a finding when times that should follow each other do not. None is not known."""
    known = [time for time in times if time is not None]
    if known != sorted(known):
        what = "its times are out of order: the clock was set back"
        yield Finding("notice", where, what, "do not rely on its duration")
