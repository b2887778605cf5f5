"""Settings of a rollout, each once: name, type, default, bounds and help.

`rolltap rollout` makes its options from the fields of `RolloutConfig`, a recipe has them as keys,
and `rolltap.rollout` takes them as keywords.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Self, TypedDict

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.choose import KindBehindSsh, RuntimeName, Settings, make_runtime
from rolltap.trainer.boxes.runtime import Runtime
from rolltap.trainer.rollouts.queue import Slots
from rolltap.trainer.toml import describe

RUNTIME_SETTINGS = tuple(field.name for field in fields(Settings))
"""Settings of a runtime that is chosen by its name."""

FREE_OPTIONS = frozenset(
    {
        "rolltap_secret_file",
        "rolltap_engine_key_file",
        "rolltap_patience",
        "rolltap_fsync",
        "listen_host",
        "listen_port",
    }
)
"""Options of the recorder that decide no session."""


class Budget(BaseModel):
    """Budgets of one session. None is no limit. A session that used one up has the status `budget`.

    `calls` is the option `--max-calls` of `rolltap rollout` and the recorder's `rolltap_max_calls`,
    and so on.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    calls: int | None = Field(default=None, ge=1)
    """Maximum number of model calls of a session."""
    sampled_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of sampled tokens of a session, of all calls together."""
    prompt_tokens: int | None = Field(default=None, ge=1)
    """Maximum length of the prompt of one call in tokens. A longer one is refused as by a model
    with that window, so that harnesses compact their history."""

    def options(self) -> dict[str, str]:
        """Return the recorder's options (`rolltap_max_calls` and others) of the budgets that are
        set."""
        given = self.model_dump(exclude_none=True)
        return {f"rolltap_max_{name}": str(value) for name, value in given.items()}


class RolloutConfig(BaseModel):
    """Settings of a rollout. The constructor raises pydantic's `ValidationError`, a `ValueError`;
    `of` `InputError`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    repositories: Path | None = None
    """Folder with the checkouts that SWE rows name, each as `OWNER__NAME`."""
    sessions: int = Field(default=8, ge=1)
    """Sessions of each task. They are one group."""
    concurrency: int = Field(default=8, ge=1)
    """Maximum number of sessions that run at the same time, with `ray` on each node."""
    ray: str | None = Field(default=None, min_length=1)
    """Address of a Ray cluster whose nodes run the sessions, as HOST:PORT; this machine is one of
    them. By default they run here."""
    preparing: int | None = Field(default=None, ge=1)
    """Maximum number of sessions whose workspace and box are made at the same time. By default
    `concurrency`."""
    preparing_timeout: float = Field(default=600.0, gt=0)
    """Seconds after which the preparation of a session has failed. It is tried again, as `retries`
    says."""
    ready: int = Field(default=4, ge=0)
    """Number of sessions that are prepared before they may run. Each has its box and its workspace.
    """
    judging: int | None = Field(default=None, ge=1)
    """Maximum number of sessions that are judged at the same time. By default `concurrency`."""
    recorders: int = Field(default=1, ge=1)
    """Number of the recorder's processes. Each uses one core; a session's id names its process."""
    timeout: float = Field(default=1800.0, gt=0)
    """Seconds after which a harness is stopped, unless its task has a time limit of its own."""
    runtime: RuntimeName = "process"
    """Where sessions run. `process` does not protect this machine from the harness; `ssh` is
    another machine, and `harbor` has environments of Harbor."""
    tools: tuple[Path, ...] = ()
    """Folders of installed programs that a box shows, read-only, under the same path. With `ssh`
    they are folders of that machine."""
    container_engine: Literal["podman", "docker"] | None = None
    """Program of the runtime `container`. By default the first that is installed."""
    container_arguments: tuple[str, ...] = ()
    """Arguments of the container engine before its command, as in `podman ARGUMENTS create`."""
    build: bool = False
    """Build the images of tasks that have only a Dockerfile. Its lines run with the rights of the
    container engine."""
    ssh: str | None = Field(default=None, min_length=1)
    """Machine of the runtime `ssh`, as in `ssh USER@HOST`: it is reached without a password."""
    ssh_kind: KindBehindSsh | None = None
    """Runtime of the boxes on the machine `ssh`. By default `sandbox`."""
    ssh_python: str | None = Field(default=None, min_length=1)
    """Python 3.11 or newer on the machine `ssh`, with psutil and pydantic. By default `python3`."""
    ssh_arguments: tuple[str, ...] = ()
    """Arguments of ssh before the machine, as in `ssh ARGUMENTS USER@HOST`."""
    harbor_python: str | None = Field(default=None, min_length=1)
    """Program of a Python that has Harbor, for the runtime `harbor`."""
    harbor_environment: str | None = Field(default=None, min_length=1)
    """Harbor's environment: its type, such as `daytona`, a class as MODULE:CLASS, or a JSON file
    with the keys that Harbor's `environment` has."""
    recorder_address: str | None = None
    """The recorder as boxes of the runtime `harbor` reach it: HOST:PORT, or https://HOST:PORT
    behind TLS of your own. The recorder itself listens where its options `listen_host` and
    `listen_port` say."""
    budget: Budget = Budget()
    """Budgets of each session."""
    retries: int = Field(default=2, ge=0)
    """Retries of a session that failed because of the engine, the recorder or the machine."""
    give_up_after: int = Field(default=8, ge=1)
    """Consecutive infrastructure failures, of two tasks at least if there are two, after which the
    rollout stops."""
    recorder: dict[str, str | list[str]] = {}
    """Further options of the recorder or mitmproxy, for example `rolltap_sampling`. A repeatable
    one has a list."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """Return the configuration with these fields. Raises `InputError`, which names each wrong
        one."""
        try:
            return cls.model_validate(settings)
        except ValidationError as error:
            raise InputError(describe(error)) from error

    @field_validator("recorder_address")
    @classmethod
    def _require_host_and_port(cls, address: str | None) -> str | None:
        if address is None:
            return None
        host, _, port = address.removeprefix("https://").rpartition(":")
        is_host = re.fullmatch(r"[^/@\s:\[\]]+|\[[0-9A-Fa-f:.]+\]", host) is not None
        is_port = port.isascii() and port.isdecimal() and 0 < int(port) < 65536
        if not (is_host and is_port):
            raise ValueError("give HOST:PORT, or https://HOST:PORT with a TLS proxy of your own")
        return address

    @model_validator(mode="after")
    def _require_port(self) -> Self:
        given = self.recorder.get("listen_port", "0")
        ports = [given] if isinstance(given, str) else given
        for port in ports:
            if not (port.isascii() and port.isdecimal() and int(port) < 65536):
                raise ValueError(f"listen_port is {port!r}: give a number up to 65535")
        return self

    @model_validator(mode="after")
    def _refuse_two_budgets(self) -> Self:
        for name in Budget.model_fields:
            option = f"rolltap_max_{name}"
            if option in self.recorder:
                flag = f"--max-{name.replace('_', '-')}"
                raise ValueError(f"set budget.{name} ({flag}) instead of {option}")
        return self

    def options(self) -> dict[str, str | list[str]]:
        """Return all options of the recorder, those of the budgets too.

        Raises `InputError` with the runtime `harbor` if no address leads to the recorder.
        """
        if self.runtime == "harbor":
            self._require_address()
        return {**self.budget.options(), **self.recorder}

    def _require_address(self) -> None:
        if self.recorder_address is None or "listen_port" not in self.recorder:
            raise InputError(
                'runtime = "harbor" needs recorder_address (--recorder-address HOST:PORT), at which'
                " its boxes reach the recorder, and the recorder's option listen_port (--set"
                " listen_port=8899), to which that address leads; listen_host=0.0.0.0 too, unless a"
                " tunnel or a TLS proxy on this machine leads there"
            )
        if self.recorders > 1 or self.ray is not None:
            key = "ray" if self.ray is not None else "recorders"
            raise InputError(
                f'{key} has no meaning with runtime = "harbor": recorder_address leads to one'
                " process of the recorder, so remove it"
            )

    def why_no_evaluations(self) -> str:
        """Return why no session of this rollout can evaluate; empty if sessions can."""
        port = self.recorder.get("listen_port")
        if port in (None, "0"):
            return ""
        own = "evaluations have a recorder of their own, which cannot listen there too"
        return f"the recorder has listen_port = {port}, and {own}"

    def slots(self, share: float = 0.0) -> Slots:
        """Return the slots of a node. Sessions that evaluate have this share of them, and one at
        least."""
        return Slots(
            preparing=self.preparing or self.concurrency,
            ready=self.ready,
            running=self.concurrency,
            judging=self.judging or self.concurrency,
            evaluation=max(1, int(share * self.concurrency)),
        )

    def make_runtime(self) -> Runtime:
        """Return the runtime. Raises `InputError` for a setting that it does not have."""
        given = {name: getattr(self, name) for name in RUNTIME_SETTINGS}
        return make_runtime(self.runtime, **given)


class RolloutArguments(TypedDict, total=False):
    """Fields of `RolloutConfig` as keywords of `rolltap.rollout`, for type checkers. `runtime` has
    its own there."""

    repositories: str | Path | None
    sessions: int
    concurrency: int
    ray: str | None
    preparing: int | None
    preparing_timeout: float
    ready: int
    judging: int | None
    recorders: int
    timeout: float
    tools: Sequence[str | Path]
    container_engine: str | None
    container_arguments: Sequence[str]
    build: bool
    ssh: str | None
    ssh_kind: str | None
    ssh_python: str | None
    ssh_arguments: Sequence[str]
    harbor_python: str | None
    harbor_environment: str | None
    recorder_address: str | None
    budget: Budget | Mapping[str, int]
    retries: int
    give_up_after: int
    recorder: Mapping[str, str | Sequence[str]]
