"""The groups of a service, as its journal has them: the events, and what a start makes of them.

A line that is damaged, or cannot follow the lines before it, is set aside: it keeps its number and
changes nothing.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal, Self, assert_never, get_args

from pydantic import BaseModel, Field, NonNegativeInt, TypeAdapter, ValidationError, model_validator

from rolltap.addons.errors import InputError
from rolltap.addons.store.records import SessionStatus
from rolltap.addons.store.tables import run_files
from rolltap.trainer.names import SessionName
from rolltap.trainer.rollouts.resume import STARTED_AGAIN, Group
from rolltap.trainer.runs.views.training import EVALUATION
from rolltap.trainer.service.journal import Journal
from rolltap.trainer.service.requests import GroupRequest, GroupView, Name, SessionView, State
from rolltap.trainer.toml import describe

TABLES = ("calls", "sessions", "events")


class Accepted(BaseModel):
    """A group was accepted, and is on the disk."""

    kind: Literal["accepted"]
    at: datetime
    id: Name
    task_id: str
    task_digest: str
    request: GroupRequest

    @model_validator(mode="after")
    def _check_id(self) -> Self:
        if self.request.id != self.id:
            raise ValueError(f"its id is {self.id!r}, and that of its request {self.request.id!r}")
        return self


class SessionEnded(SessionView):
    """A session of a group has ended, one attempt of it."""

    kind: Literal["session"]
    at: datetime
    id: Name
    sampled: NonNegativeInt
    left_out: dict[str, NonNegativeInt]


class Cancelled(BaseModel):
    """A group was cancelled, or one session of it."""

    kind: Literal["cancelled"]
    at: datetime
    id: Name
    session_id: str | None = None
    """Id of the session's first attempt."""


class GroupEnded(BaseModel):
    """All sessions of a group have ended."""

    kind: Literal["ended"]
    at: datetime
    id: Name
    state: State
    session_ids: list[str]
    rewards: dict[str, Annotated[float, Field(allow_inf_nan=False)]]
    sampled: NonNegativeInt
    left_out: dict[str, NonNegativeInt]


class Published(BaseModel):
    """Weights became the policy."""

    kind: Literal["policy"]
    at: datetime
    version: str
    adapter: str | None = None


AnyEvent = Accepted | SessionEnded | Cancelled | GroupEnded | Published
_EVENT: TypeAdapter[AnyEvent] = TypeAdapter(Annotated[AnyEvent, Field(discriminator="kind")])


def _kinds() -> Iterable[str]:
    for event in get_args(AnyEvent):
        yield get_args(event.model_fields["kind"].annotation)[0]


_EVENT_KINDS = tuple(_kinds())
"""Values of `kind`."""


@dataclass(slots=True)
class AcceptedGroup:
    """The part of a group that is kept after its end: the numbers of its events, which `Book.view`
    reads again, and the digest of its request."""

    number: int
    digest: str
    evaluates: bool
    sessions: list[int] = field(default_factory=list)
    cancelled: bool = False
    ended: int | None = None


@dataclass(slots=True)
class OpenGroup:
    """A group that has not ended.

    Attributes:
        group: The group as it is run. Without it the group is not run, because of its `problem`.
        known: Id -> outcome of its sessions that have an event.
        begun: Id of a session, as of the request -> id of the first attempt of this start.
        stopped: Ids of its sessions, as of the request, that were cancelled.
        writes: Events that are being written.
        over: Set at its end.
    """

    request: GroupRequest
    task_digest: str
    group: Group | None = None
    problem: str | None = None
    known: dict[str, SessionStatus] = field(default_factory=dict)
    begun: dict[str, str] = field(default_factory=dict)
    stopped: set[str] = field(default_factory=set)
    writes: list[asyncio.Task[None]] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def unfinished(self) -> set[str]:
        """Return the ids of the request's sessions that have no outcome of their own: they wait,
        run, are retried, or were given up and may run at the next start."""
        ended = set()
        for name, status in self.known.items():
            if status not in STARTED_AGAIN:
                ended.add(SessionName.parse(name).place)
        return set(self.request.session_ids) - ended - self.stopped


class GroupBook:
    """The groups of the journal of a service with the run folder `run`."""

    def __init__(self, journal: Journal, run: Path) -> None:
        self.journal = journal
        self.accepted: dict[str, AcceptedGroup] = {}
        self.open: dict[str, OpenGroup] = {}
        self.changes = asyncio.Lock()
        """Held while a group is accepted, cancelled or ended."""
        self.policies: dict[str, int] = {}
        """Version -> number of policies before it."""
        self._run = run

    def load(self) -> None:
        """Read the journal. What cannot be used is set aside, and said; the rest is taken."""
        for number, event in self.journal.read():
            try:
                self._take(number, _EVENT.validate_python(event))
            except ValidationError as error:
                self.journal.put_aside(number, describe(error, {"": _EVENT_KINDS}))
            except InputError as error:
                self.journal.put_aside(number, str(error))

    def _take(self, number: int, event: AnyEvent) -> None:
        """Take an event. Raises `InputError` for one that cannot follow those before it."""
        if isinstance(event, Published):
            self.policies.setdefault(event.version, len(self.policies))
            return
        if isinstance(event, Accepted):
            if event.id in self.accepted:
                raise InputError(f"the group {event.id} is there already")
            self.accept(number, event.request, event.task_digest)
            return
        group = self.open.get(event.id)
        if group is None:
            raise InputError(f"no group {event.id} is open there")
        accepted = self.accepted[event.id]
        if isinstance(event, Cancelled) and event.session_id is None:
            accepted.cancelled = True
        elif isinstance(event, Cancelled):
            assert event.session_id is not None
            group.stopped.add(SessionName.parse(event.session_id).place)
        elif isinstance(event, GroupEnded):
            self.close(event.id, number)
        elif isinstance(event, SessionEnded):
            place = SessionName.parse(event.session_id).place
            if event.session_id in group.known or place not in group.request.session_ids:
                what = f"no session {event.session_id} that runs"
                raise InputError(f"the group {event.id} has {what}")
            accepted.sessions.append(number)
            group.known[event.session_id] = event.status
        else:
            assert_never(event)

    def accept(self, number: int, request: GroupRequest, task_digest: str) -> OpenGroup:
        """Take a request with the number of its event."""
        digest = request_digest(request)
        self.accepted[request.id] = AcceptedGroup(number, digest, request.evaluation)
        group = OpenGroup(request, task_digest)
        self.open[request.id] = group
        return group

    def close(self, name: str, number: int) -> None:
        """End a group with the number of its event."""
        self.accepted[name].ended = number
        self.open.pop(name).over.set()

    def folder(self, name: str) -> Path:
        """Return the run folder of a group. Raises `KeyError` for an unknown name."""
        if self.accepted[name].evaluates:
            return self._run / EVALUATION
        return self._run

    def view(self, name: str) -> GroupView:
        """Return a group. Raises `KeyError` for an unknown name."""
        accepted = self.accepted[name]
        begin, *sessions = self.journal.get_all([accepted.number, *accepted.sessions])
        run = self.folder(name)
        view = GroupView(
            id=name,
            task_id=begin["task_id"],
            state="cancelled" if accepted.cancelled else "open",
            accepted_at=begin["at"],
            session_ids=GroupRequest.model_validate(begin["request"]).session_ids,
            sessions=[SessionView.model_validate(session) for session in sessions],
            run=str(run.absolute()),
        )
        if name in self.open:
            view.problem = self.open[name].problem
        if accepted.ended is None:
            return view
        end = GroupEnded.model_validate(self.journal.get(accepted.ended))
        view.state = end.state
        view.ended_at = end.at
        view.sampled = end.sampled
        view.left_out = end.left_out
        for table in TABLES:
            view.shards[table] = [path.name for path in run_files(run, table)]
        return view

    def waiting(self) -> Counter[int]:
        """Return priority -> number of sessions of open groups that have no outcome."""
        waiting: Counter[int] = Counter()
        for group in self.open.values():
            if group.problem is None:
                waiting[group.request.priority] += len(group.unfinished())
        return waiting


def request_digest(request: GroupRequest) -> str:
    """Return the fingerprint by which a request is known again."""
    return hashlib.sha256(request.model_dump_json().encode()).hexdigest()
