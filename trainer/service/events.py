"""Events of a journal, as a start reads them: what a damaged or foreign line holds is no event."""

from datetime import datetime
from typing import Annotated, Literal, Self, get_args

from pydantic import BaseModel, Field, NonNegativeInt, TypeAdapter, model_validator

from rolltap.trainer.service.requests import GroupRequest, Name, SessionView, State


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
    """A group was cancelled."""

    kind: Literal["cancelled"]
    at: datetime
    id: Name


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
EVENT: TypeAdapter[AnyEvent] = TypeAdapter(Annotated[AnyEvent, Field(discriminator="kind")])
EVENT_KINDS: tuple[str, ...] = tuple(get_args(event.model_fields["kind"].annotation)[0] for event in get_args(AnyEvent))
"""Values of `kind`."""
