"""Requests to the service, and its answers. `app` has the routes."""

import json
import math
import re
import secrets
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from rolltap.addons.options import require_options
from rolltap.addons.store.records import SessionStatus
from rolltap.trainer.names import MOST_CHARACTERS
from rolltap.trainer.tasks.bounds import plain_text

MOST_SESSIONS = 1024
"""Most sessions of a group."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._~@-]{1,200}$")]
_SESSION = r"[A-Za-z0-9._@]+"
"""A session's name. Without a dash, so that no two groups have a session of the same id, and
without the tilde of retries."""
MOST_INTEGER = (1 << 63) - 1
MOST_DEPTH = 32
"""Most levels of a request's JSON."""
State = Literal["open", "ended", "cancelled", "expired"]


def _names(given: object) -> list[str]:
    if isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= MOST_SESSIONS:
        return [str(number) for number in range(given)]
    listed: list[object] = []
    if isinstance(given, list | tuple):
        listed = list(given)
    names = [name for name in listed if isinstance(name, str) and re.fullmatch(_SESSION, name)]
    if not 1 <= len(names) <= MOST_SESSIONS or len(names) < len(listed):
        what = f"give a number from 1 to {MOST_SESSIONS}, or a list of so many names"
        raise ValueError(f"{what} of letters, digits and ._@")
    if len({*names}) < len(names):
        raise ValueError("two names are the same: give each session a name of its own")
    return names


def require_plain(value: object) -> None:
    """Refuse what JSON has no form for, or no program can be given, at any depth of a value.

    Raises `ValueError`.
    """
    level = [value]
    for _ in range(MOST_DEPTH):
        below: list[object] = []
        for each in level:
            if isinstance(each, str):
                plain_text(each)
            elif isinstance(each, float) and not math.isfinite(each):
                raise ValueError(f"{each} is no number of JSON: give a finite one")
            elif isinstance(each, int) and abs(each) > MOST_INTEGER:
                size = len(hex(each)) // 2 - 1
                raise ValueError(f"a number has {size} bytes: give one of at most 8")
            elif isinstance(each, dict):
                below += [*each, *each.values()]
            elif isinstance(each, list | tuple):
                below += each
        level = below
    if level:
        raise ValueError(f"it has more than {MOST_DEPTH} levels of lists and objects")


class _Request(BaseModel):
    """Fields of a body, which are plain JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _check_plain(cls, fields: Any) -> Any:
        require_plain(fields)
        return fields


class ForkRequest(_Request):
    """A recorded call, from which on sessions go their own way."""

    session: str
    """Id of a session of the run that has ended, of the same task."""
    call: str
    """Id of one of its calls. The calls that began before it answer as they did then."""


class GroupRequest(_Request):
    """A group of sessions of one task. The same `id` with the same request is the same group."""

    task: str | dict[str, Any]
    """Id of a task that the service has loaded, or the fields of a task, as a line of a task
    file."""
    id: Name = Field(default_factory=lambda: secrets.token_hex(8))
    """Name of the group, by which the request can be sent again. By default a random one."""
    sessions: Annotated[
        tuple[str, ...],
        BeforeValidator(_names, json_schema_input_type=int | list[str]),
    ] = Field(default=8, validate_default=True)
    """Number of sessions, or a name for each. A session's id is `<id>-<name>`, of at most 200
    characters."""
    priority: int = Field(
        default=50,
        strict=True,
        ge=0,
        le=100,
    )
    """Groups of a higher priority start first. No session that runs is stopped for them."""
    deadline: AwareDatetime | None = None
    """Time, with its zone, at which sessions that have not ended are stopped."""
    sampling: dict[str, float] = {}
    """Sampling parameters in place of the service's, key by key: those of `rolltap_sampling`."""
    evaluation: bool = Field(default=False, strict=True)
    """True for a group that is not trained. It is recorded in the run folder `evaluation` below
    that of the service, and has slots of its own, see `--evaluation-share`."""
    fork: ForkRequest | None = None
    """Call of a recorded session that the sessions fork: they repeat the session up to it."""

    @field_validator("sampling")
    @classmethod
    def _check_sampling(cls, sampling: dict[str, float]) -> dict[str, float]:
        require_options({"rolltap_sampling": json.dumps(sampling)})
        return sampling

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        longest = max(map(len, self.session_ids))
        if longest > MOST_CHARACTERS:
            raise ValueError(
                f"a session's id, '<id>-<name>', has {longest} characters: give a shorter 'id' or "
                f"shorter names in 'sessions', of at most {MOST_CHARACTERS} together"
            )
        return self

    @property
    def session_ids(self) -> list[str]:
        """Ids of the sessions' first attempts."""
        return [f"{self.id}-{name}" for name in self.sessions]

    def seconds_left(self) -> float:
        """Return the seconds to the deadline; infinity without one."""
        if self.deadline is None:
            return math.inf
        return (self.deadline - datetime.now(UTC)).total_seconds()


class PolicyRequest(_Request):
    """Weights that a trainer has loaded into the engines."""

    version: str = Field(pattern=r"^[A-Za-z0-9._-]{1,100}$")
    """Name of the weights. Tokens that they sample are named by it."""
    adapter: str | None = Field(default=None, min_length=1)
    """Name of the LoRA adapter in the engines. By default the base model's weights."""


class SessionView(BaseModel):
    """A session that has ended, one attempt of it."""

    session_id: str
    status: SessionStatus
    reward: float | None = Field(default=None, allow_inf_nan=False)
    policy_version: str | None = None
    error: str | None = None


class GroupView(BaseModel):
    """A group, and its sessions that have ended, in the order of their ends.

    `run` is the folder with their calls, and `shards` are the files in it of each table. `sampled`
    is the number of their sampled tokens and `left_out` why some are not trained (`LeftOut`); both
    are None until the group has ended. `problem` is why a group that is open is not run: its task
    is not the one that it was accepted for.
    """

    id: str
    task_id: str
    state: State
    accepted_at: datetime
    ended_at: datetime | None = None
    session_ids: list[str]
    sessions: list[SessionView] = []
    run: str
    shards: dict[str, list[str]] = {}
    sampled: int | None = None
    left_out: dict[str, int] | None = None
    problem: str | None = None
