"""Requests to the service, and its answers. `app` has the routes."""

import json
import re
import secrets
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from rolltap.addons.options import require_options
from rolltap.addons.store.records import SessionStatus

MOST_SESSIONS = 1024
"""Most sessions of a group."""
_NAME = r"[A-Za-z0-9._~@-]{1,200}"
Name = Annotated[str, Field(pattern=rf"^{_NAME}$")]
State = Literal["open", "ended", "cancelled", "expired"]


def _names(given: object) -> list[str]:
    if isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= MOST_SESSIONS:
        return [str(number) for number in range(given)]
    names = given if isinstance(given, list | tuple) else []
    if 1 <= len(names) <= MOST_SESSIONS and all(isinstance(name, str) and re.fullmatch(_NAME, name) for name in names):
        if len({*names}) < len(names):
            raise ValueError("two names are the same: give each session a name of its own")
        return [*names]
    raise ValueError(
        f"give a number from 1 to {MOST_SESSIONS}, or a list of so many names of letters, digits and ._~@-"
    )


class GroupRequest(BaseModel):
    """A group of sessions of one task. The same `id` with the same request names the same group."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    task: str | dict[str, Any]
    """Id of a task that the service has loaded, or the fields of a task, as a line of a task file."""
    id: Name = Field(default_factory=lambda: secrets.token_hex(8))
    """Name of the group, by which the request can be sent again. By default a random one."""
    sessions: Annotated[tuple[str, ...], BeforeValidator(_names, json_schema_input_type=int | list[str])] = Field(
        default=8, validate_default=True
    )
    """Number of sessions, or a name for each. A session's id is `<id>-<name>`."""
    priority: int = Field(default=50, ge=0, le=100)
    """Groups of a higher priority start first. No session that runs is stopped for them."""
    deadline: AwareDatetime | None = None
    """Time, with its zone, at which sessions that have not ended are stopped."""
    sampling: dict[str, float] = {}
    """Sampling parameters in place of the service's, key by key: those of `rolltap_sampling`."""
    evaluation: bool = False
    """True for a group that is not trained: it has slots of its own, see `--evaluation-share`."""

    @field_validator("sampling")
    @classmethod
    def _check_sampling(cls, sampling: dict[str, float]) -> dict[str, float]:
        require_options({"rolltap_sampling": json.dumps(sampling)})
        return sampling

    @property
    def session_ids(self) -> list[str]:
        """Ids of the sessions' first attempts."""
        return [f"{self.id}-{name}" for name in self.sessions]


class PolicyRequest(BaseModel):
    """Weights that a trainer has loaded into the engines."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    version: str = Field(pattern=r"^[A-Za-z0-9._-]{1,100}$")
    """Name of the weights. Tokens that they sample are named by it."""
    adapter: str | None = Field(default=None, min_length=1)
    """Name of the LoRA adapter in the engines. By default the base model's weights."""


class SessionView(BaseModel):
    """A session that has ended, one attempt of it."""

    session_id: str
    status: SessionStatus
    reward: float | None = None
    policy_version: str | None = None
    error: str | None = None


class GroupView(BaseModel):
    """A group, and its sessions that have ended, in the order of their ends.

    `run` is the folder with their calls, and `shards` are the files in it of each table. `sampled` is the number of
    their sampled tokens and `left_out` why some are not trained (`LeftOut`); both are None until the group has ended.
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
