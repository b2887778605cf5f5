"""The keys of a Harbor task's task.toml, and which of them rolltap cannot have."""

import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field

from rolltap.addons.errors import InputError
from rolltap.trainer.rollouts.tasks.limits import Limits

_VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
_SIZE = re.compile(r"([0-9.]+)\s*([GMK])", re.IGNORECASE)
_MEBIBYTES = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}


def _megabytes(value: object) -> object:
    """Read sizes as older tasks write them: `2G`, `512M`."""
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    return float(match[1]) * _MEBIBYTES[match[2].upper()] if match else value


_Megabytes = Annotated[float | None, BeforeValidator(_megabytes), Field(gt=0)]
_Anything = Any  # a key that is refused when it has a value


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Network(_Table):
    network_mode: Literal["no-network", "public", "allowlist"] | None = None
    allowed_hosts: list[str] | None = None


class _Agent(_Network):
    timeout_sec: float | None = Field(default=None, gt=0)
    user: _Anything = None


class _Environment(_Network):
    build_timeout_sec: float = 600.0
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: _Megabytes = Field(default=None, validation_alias=AliasChoices("memory_mb", "memory"))
    storage_mb: _Megabytes = Field(default=None, validation_alias=AliasChoices("storage_mb", "storage"))
    gpus: int | None = None
    gpu_types: _Anything = None
    tpu: _Anything = None
    mcp_servers: _Anything = None
    env: dict[str, str] = {}
    skills_dir: _Anything = None
    healthcheck: _Anything = None
    workdir: str | None = None
    allow_internet: bool | None = None

    def limits(self) -> Limits:
        """Return the limits of a session's box."""
        memory, storage = (None if size is None else size / 1024 for size in (self.memory_mb, self.storage_mb))
        return Limits(cpus=self.cpus, memory_gib=memory, disk_gib=storage)


class _Verifier(_Network):
    timeout_sec: float = Field(default=600.0, gt=0)
    env: dict[str, str] = {}
    user: _Anything = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: _Anything = None
    collect: _Anything = None


class _Artifact(_Table):
    source: str
    destination: str | None = None
    exclude: list[str] = []
    service: str | None = None


class HarborConfig(_Table):
    """A task.toml: https://harborframework.com/docs/task-format. `metadata`, `task` and `solution` have no effect."""

    schema_version: str = Field(default="1.4", validation_alias=AliasChoices("schema_version", "version"))
    task: dict[str, Any] | None = None
    metadata: dict[str, Any] = {}
    verifier: _Verifier = _Verifier()
    agent: _Agent = _Agent()
    environment: _Environment = _Environment()
    solution: dict[str, Any] = {}
    source: str | None = None
    multi_step_reward_strategy: str | None = None
    steps: _Anything = None
    artifacts: list[str | _Artifact] = []

    def refusals(self) -> list[str]:
        """Return the keys with a value that rolltap cannot have, each as `'KEY' = VALUE`."""
        found: list[tuple[str, object]] = [("steps", self.steps)]
        names = ("gpus", "gpu_types", "tpu", "mcp_servers", "skills_dir", "healthcheck")
        found += [(f"environment.{name}", getattr(self.environment, name)) for name in names]
        if self.environment.os.lower() != "linux":
            found.append(("environment.os", self.environment.os))
        found.append(("agent.user", self.agent.user))
        found += [(f"verifier.{name}", getattr(self.verifier, name)) for name in ("user", "environment", "collect")]
        if (
            self.verifier.environment_mode == "shared"
        ):  # Harbor's default; in words it asks for what is judged afresh here
            found.append(("verifier.environment_mode", "shared"))
        return [f"{key!r} = {str(value)[:100]}" for key, value in found if value not in (None, 0, [], {})]

    def network(self) -> str | None:
        """Return the key that asks for a network in words; None when none does. Harbor's default does not ask."""
        for name, table in (("agent", self.agent), ("verifier", self.verifier), ("environment", self.environment)):
            if table.network_mode not in (None, "no-network"):
                hosts = f" with {', '.join(table.allowed_hosts)}" if table.allowed_hosts else ""
                return f"'{name}.network_mode' is {table.network_mode}{hosts}"
        return "'environment.allow_internet' is true" if self.environment.allow_internet else None

    def artifact_paths(self, workdir: str) -> list[str]:
        """Return the artifacts as patterns relative to the workspace. Raises `InputError` for one outside of it."""
        patterns: list[str] = []
        for artifact in self.artifacts:
            source = artifact if isinstance(artifact, str) else artifact.source
            place = PurePosixPath(workdir, source)
            if not place.is_relative_to(workdir) or ".." in place.parts:
                raise InputError(
                    f"the artifact {source} is outside the work folder {workdir}, which is all that is kept"
                )
            name = str(place.relative_to(workdir))
            patterns += ["**"] if name == "." else [name, f"{name}/**"]
        return patterns


def resolve_variables(values: Mapping[str, str], file: Path) -> dict[str, str]:
    """Return variables with `${NAME}` and `${NAME:-default}` from this process's environment.

    Raises `InputError` for a name that is not set and has no default.
    """
    resolved: dict[str, str] = {}
    for key, value in values.items():
        match = _VARIABLE.fullmatch(value)
        found = os.environ.get(match[1], match[2]) if match else value
        if found is None:
            raise InputError(f"{file}: the variable {key} needs {value}, which is not set: set it in the environment")
        resolved[key] = found
    return resolved
