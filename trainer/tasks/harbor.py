"""Harbor task folders as tasks.

The format is that of Harbor 0.25 (https://harborframework.com/docs/task-format): task.toml,
instruction.md, environment/, tests/test.sh, and solution/solve.sh, which no session sees.

A Dockerfile that only copies files has its effect without an image being built: see
`dockerfile.py`.
"""

import ipaddress
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rolltap.addons.errors import InputError
from rolltap.trainer.tasks.bounds import Command, Cores, Seconds
from rolltap.trainer.tasks.dockerfile import is_plain_system, read_dockerfile
from rolltap.trainer.tasks.task import Build, CommandJudge, Limits, Task
from rolltap.trainer.toml import load_toml

_VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
_SIZE = re.compile(r"([0-9.]+)\s*([GMK])", re.IGNORECASE)
_MEBIBYTES = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}


def _megabytes(value: object) -> object:
    """Read sizes as older tasks write them: `2G`, `512M`."""
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        if match is not None:
            return float(match[1]) * _MEBIBYTES[match[2].upper()]
    return value


_Megabytes = Annotated[float | None, BeforeValidator(_megabytes), Field(ge=1, le=1 << 30)]
_Anything = Any  # a key that is refused when it has a value


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Network(_Table):
    """A network policy: of the environment, or of the agent's or the verifier's phase alone."""

    network_mode: Literal["no-network", "public", "allowlist"] | None = None
    allowed_hosts: list[str] | None = None

    @model_validator(mode="after")
    def _check_hosts(self) -> Self:
        if self.allowed_hosts and self.network_mode != "allowlist":
            raise ValueError("'allowed_hosts' needs 'network_mode' = \"allowlist\"")
        for host in self.allowed_hosts or []:
            if "/" in host:
                why = "rolltap allows no ranges of addresses: name the hosts"
                raise ValueError(f"'allowed_hosts' has {host!r}: {why}")
        return self

    def allow(self) -> list[str] | None:
        """Return the hosts of the policy as `Task.allow` has them; None without a policy.

        A host of Harbor's stands for all its ports.
        """
        match self.network_mode:
            case "public":
                return ["*:*"]
            case "allowlist":
                return [_on_all_ports(host) for host in self.allowed_hosts or []]
            case "no-network":
                return []
        return None


def _on_all_ports(host: str) -> str:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return f"{host}:*"
    return f"[{host}]:*"


class _Agent(_Network):
    timeout_sec: Seconds | None = None
    user: _Anything = None


class _Environment(_Network):
    build_timeout_sec: Seconds = 600.0
    docker_image: str | None = None
    os: str = "linux"
    cpus: Cores | None = None
    memory_mb: _Megabytes = Field(
        default=None,
        validation_alias=AliasChoices("memory_mb", "memory"),
    )
    storage_mb: _Megabytes = Field(
        default=None,
        validation_alias=AliasChoices("storage_mb", "storage"),
    )
    gpus: int | None = None
    gpu_types: _Anything = None
    tpu: _Anything = None
    mcp_servers: _Anything = None
    env: dict[str, str] = {}
    skills_dir: _Anything = None
    healthcheck: _Anything = None
    workdir: str | None = None
    allow_internet: bool | None = None

    def allow(self) -> list[str] | None:
        """Return the hosts of both phases. `allow_internet` is Harbor's older word for a policy."""
        hosts = super().allow()
        if hosts is not None or self.allow_internet is None:
            return hosts
        if self.allow_internet:
            return ["*:*"]
        return []

    def limits(self) -> Limits:
        """Return the limits of a session's box."""
        return Limits(
            cpus=self.cpus,
            memory_gib=self.memory_mb and self.memory_mb / 1024,
            disk_gib=self.storage_mb and self.storage_mb / 1024,
        )


class _Verifier(_Network):
    timeout_sec: Seconds = 600.0
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


class _Rolltap(_Table):
    """Fields that rolltap has and Harbor has not. `run` is that of a `CommandJudge`."""

    run: Command = []


class _Metadata(_Table):
    model_config = ConfigDict(extra="allow")

    rolltap: _Rolltap = _Rolltap()


class HarborConfig(_Table):
    """A task.toml: https://harborframework.com/docs/task-format.

    `task`, `solution` and other `metadata` than `metadata.rolltap` have no effect.
    """

    schema_version: str = Field(
        default="1.4",
        validation_alias=AliasChoices("schema_version", "version"),
    )
    task: dict[str, Any] | None = None
    metadata: _Metadata = _Metadata()
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
        found: dict[str, object] = {"steps": self.steps}
        for name in ("gpus", "gpu_types", "tpu", "mcp_servers", "skills_dir", "healthcheck"):
            found[f"environment.{name}"] = getattr(self.environment, name)
        if self.environment.os.lower() != "linux":
            found["environment.os"] = self.environment.os
        found["agent.user"] = self.agent.user
        for name in ("user", "environment", "collect"):
            found[f"verifier.{name}"] = getattr(self.verifier, name)
        # Harbor's default; set, it asks for the agent's box
        if self.verifier.environment_mode == "shared":
            found["verifier.environment_mode"] = "shared"
        refused: list[str] = []
        for key, value in found.items():
            if value not in (None, 0, [], {}):
                refused.append(f"{key!r} = {str(value)[:100]}")
        return refused

    def hosts(self, phase: Literal["agent", "verifier"]) -> list[str] | None:
        """Return the hosts of a phase: by its own policy, else the environment's.

        None stands for Harbor's default, a public network, for which nobody asked.
        """
        own: _Network = getattr(self, phase)
        hosts = own.allow()
        if hosts is None:
            hosts = self.environment.allow()
        return hosts

    def artifact_paths(self, workdir: str) -> list[str]:
        """Return the artifacts as patterns relative to the workspace.

        Raises `InputError` for one outside of it.
        """
        patterns: list[str] = []
        for artifact in self.artifacts:
            source = artifact if isinstance(artifact, str) else artifact.source
            place = PurePosixPath(workdir, source)
            if not place.is_relative_to(workdir) or ".." in place.parts:
                outside = f"the artifact {source} is outside the work folder {workdir}"
                raise InputError(f"{outside}: only that is kept")
            name = str(place.relative_to(workdir))
            if name == ".":
                patterns.append("**")
            else:
                patterns += [name, f"{name}/**"]
        return patterns


def resolve_variables(values: Mapping[str, str], file: Path) -> dict[str, str]:
    """Return variables with `${NAME}` and `${NAME:-default}` filled in.

    Raises `InputError` for one that is not set.
    """
    resolved: dict[str, str] = {}
    for key, value in values.items():
        match = _VARIABLE.fullmatch(value)
        found: str | None = value
        if match is not None:
            found = os.environ.get(match[1], match[2])
        if found is None:
            advice = "which is not set: set it in the environment"
            raise InputError(f"{file}: the variable {key} needs {value}, {advice}")
        resolved[key] = found
    return resolved


_WORKDIR = "/app"
_LOGS = "/logs/verifier"
_CANARY = re.compile(r"^(<!--.*canary.*-->|#.*canary.*)$", re.IGNORECASE)
_DOWNLOADS = re.compile(
    r"\b(apt-get|apt|apk|yum|dnf|curl|wget|uvx|npx)\b|"
    r"\b(pip3?|uv|npm|cargo|go|conda) (\w+ )*install\b|\bgit clone\b"
)


def is_harbor(folder: Path) -> bool:
    """Return whether a folder is a Harbor task."""
    return (folder / "task.toml").is_file()


def load_harbor(folder: Path) -> Task:
    """Return the task of a Harbor folder.

    The judge runs `tests/test.sh`, mounted at /tests, in a fresh box.

    Files that the Dockerfile copies into its work folder are laid into the workspace, and an image
    that is a plain operating system or Python is optional. A Dockerfile that needs a build is the
    task's `build`. A verifier with `environment_mode = "separate"` gets the declared artifacts
    only, others get all changes of the work folder; what the agent changed elsewhere in its box is
    not judged. Network policies are the `allow` of the task and of its judge.

    Raises pydantic's `ValidationError`, and `InputError`, which names the files and keys, for what
    is missing, and for what Harbor has and rolltap has not: several steps, other services, users,
    GPUs, MCP servers, skills, health checks, a verifier's own image or the agent's box for it,
    Windows.
    """
    folder = folder.resolve()
    file = folder / "task.toml"
    config = load_toml(file, HarborConfig)
    if faults := _faults(folder, config):
        raise InputError(f"{folder}: {'; '.join(faults)}")
    environment = _environment(folder, config)
    solution = folder / "solution"
    judge = _judge(folder, config, environment.workdir)
    return Task(
        id=folder.name,
        instruction=_instruction(folder),
        files=environment.files,
        image=environment.image,
        image_optional=environment.optional,
        build=environment.build,
        workdir=environment.workdir,
        timeout=config.agent.timeout_sec,
        limits=config.environment.limits(),
        env={**environment.env, **resolve_variables(config.environment.env, file)},
        allow=config.hosts("agent"),
        needs_network=None if judge.allow else _download(folder / "tests"),
        judge=judge,
        solution=solution if (solution / "solve.sh").is_file() else None,
        source=str(folder),
    )


def _faults(folder: Path, config: HarborConfig) -> list[str]:
    """Return the parts of a folder that are missing, and those that rolltap cannot have."""
    faults = []
    refusals = ", ".join(config.refusals())
    if refusals:
        faults.append(f"task.toml: rolltap cannot have {refusals}: remove it from the task")
    unusable = ["environment/docker-compose.yaml", "trajectory.json"]
    if config.verifier.environment_mode == "separate":
        unusable.append("tests/Dockerfile")
    found = [name for name in unusable if (folder / name).exists()]
    faults += [f"{name}: rolltap cannot use it: remove it from the task" for name in found]
    if not (folder / "instruction.md").is_file():
        faults.append("instruction.md is missing: it is what the agent is told")
    if not (folder / "tests" / "test.sh").is_file():
        faults.append("tests/test.sh is missing: it judges the task")
    dockerfile = folder / "environment" / "Dockerfile"
    if config.environment.docker_image is None and not dockerfile.is_file():
        faults.append("give environment/Dockerfile, or 'environment.docker_image' in task.toml")
    return faults


class _FoundEnvironment(NamedTuple):
    """An image or its build, and what lies over its files in the work folder.

    `optional` as `Task.image_optional`.
    """

    image: str | None
    optional: bool
    workdir: str
    files: dict[str, Path]
    env: dict[str, str]
    build: Build | None = None


def _environment(folder: Path, config: HarborConfig) -> _FoundEnvironment:
    source = folder / "environment"
    image = config.environment.docker_image
    given = config.environment.workdir
    files: dict[str, Path] = {}
    if image is not None and not (source / "Dockerfile").is_file():
        if source.is_dir() and any(source.iterdir()):
            files["."] = source
        return _FoundEnvironment(image, is_plain_system(image), given or _WORKDIR, files, {})
    says = read_dockerfile(source / "Dockerfile")
    workdir = given or says.workdir or _WORKDIR
    unclear = says.unclear
    for place, file in says.files.items():
        if PurePosixPath(place).is_relative_to(workdir):
            files[str(PurePosixPath(place).relative_to(workdir))] = file
        elif unclear is None:
            unclear = f"COPY to {place}, outside the work folder {workdir}"
    optional = says.base is None or is_plain_system(says.base)
    if unclear is None and (image is None or optional):
        return _FoundEnvironment(image or says.base, optional, workdir, files, says.env)
    if image is not None:
        return _FoundEnvironment(image, False, workdir, {}, {})
    build = Build(folder=source, timeout=config.environment.build_timeout_sec, why=unclear or "")
    return _FoundEnvironment(None, False, workdir, {}, {}, build)


def _instruction(folder: Path) -> str:
    """Return the instruction without the canary lines at its beginning, as Harbor gives it to an
    agent."""
    file = folder / "instruction.md"
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {file}: {error}") from error
    while lines and _CANARY.match(lines[0].strip()):
        del lines[0]
    return "\n".join(lines).strip()


def _judge(folder: Path, config: HarborConfig, workdir: str) -> CommandJudge:
    script = folder / "tests" / "test.sh"
    first = script.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    # the script is mounted as it is, perhaps without its executable bit
    program = ["bash"]
    if first.startswith("#!"):
        program = shlex.split(first[2:])
    paths = None
    if config.verifier.environment_mode == "separate":
        paths = config.artifact_paths(workdir)
    return CommandJudge(
        command=[*program, "/tests/test.sh"],
        run=config.metadata.rolltap.run,
        timeout=config.verifier.timeout_sec,
        paths=paths,
        # the script's exit status says nothing
        reward_files=[f"{_LOGS}/reward.txt", f"{_LOGS}/reward.json"],
        mounts={"/tests": folder / "tests"},
        writable=[_LOGS],
        env=resolve_variables(config.verifier.env, folder / "task.toml"),
        allow=config.hosts("verifier") or [],
    )


def _download(tests: Path) -> str | None:
    """Return the first line of the tests' shell scripts that downloads something; None without one.

    Such a script without network mostly writes the reward 0, which would be taken for the agent's.
    """
    for script in sorted(tests.rglob("*.sh")):
        lines = script.read_text(encoding="utf-8", errors="replace").splitlines()
        for number, line in enumerate(lines, start=1):
            if _DOWNLOADS.search(line.partition("#")[0]):
                return f"{script}, line {number}: {line.strip()[:100]}"
    return None
