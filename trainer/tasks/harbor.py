"""Harbor task folders as tasks.

The format is that of Harbor 0.25 (https://harborframework.com/docs/task-format): task.toml, instruction.md,
environment/, tests/test.sh, and solution/solve.sh, which no session sees.

A Dockerfile that only copies files has its effect without an image being built: see `read_dockerfile`.
"""

import json
import os
import posixpath
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import dropwhile
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field

from rolltap.addons.errors import InputError
from rolltap.trainer.tasks.bounds import Command, Cores, Seconds
from rolltap.trainer.tasks.task import Build, CommandJudge, Limits, Task
from rolltap.trainer.toml import load_toml

_NO_EFFECT = {"CMD", "EXPOSE", "LABEL", "MAINTAINER"}  # on files, folders and the environment of other commands
_PLAIN_SYSTEMS = {"alpine", "busybox", "debian", "python", "ubuntu"}


@dataclass(slots=True)
class Dockerfile:
    """Content of a Dockerfile.

    Attributes:
        base: Image of its FROM; None for `scratch`.
        workdir: Absolute path of its last WORKDIR; None without one.
        env: Its variables.
        files: Absolute path in the image -> file or folder of the build's folder. A folder's content is copied.
        unclear: First line that only a build can carry out, as `line N: TEXT`; None when the fields say it all.
    """

    base: str | None = None
    workdir: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)
    unclear: str | None = None


def read_dockerfile(file: Path) -> Dockerfile:
    """Return what a Dockerfile says. With `unclear` the other fields are those of its other lines."""
    says = Dockerfile()
    if (file.parent / ".dockerignore").exists():
        says.unclear = "it has a .dockerignore"
    for number, line in _lines(file.read_text(encoding="utf-8")):
        if not _carry_out(line, says, file.parent):
            says.unclear = says.unclear or f"line {number}: {line[:100]}"
    return says


def is_plain_system(image: str) -> bool:
    """Return whether an image is an official one of an operating system or of Python, with nothing of a task."""
    name = image.removeprefix("docker.io/").removeprefix("library/")
    return re.split("[:@]", name)[0] in _PLAIN_SYSTEMS


def _lines(text: str) -> list[tuple[int, str]]:
    """Return the instructions with the number of their first line, without comments, continued lines joined."""
    lines: list[tuple[int, str]] = []
    open_line: tuple[int, str] | None = None
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if line.startswith("#") or (not line and open_line is None):
            continue
        first, before = open_line or (number, "")
        if line.endswith("\\"):
            open_line = first, before + line[:-1] + " "
        else:
            open_line = None
            lines.append((first, before + line))
    return lines if open_line is None else [*lines, open_line]


def _carry_out(line: str, says: Dockerfile, folder: Path) -> bool:
    """Add an instruction to `says`. Return False when only a build can carry it out."""
    instruction, _, rest = line.partition(" ")
    instruction, rest = instruction.upper(), rest.strip()
    if instruction in _NO_EFFECT:
        return True
    if "$" in rest or "<<" in rest:
        return False
    match instruction:
        case "FROM":
            first = says.base is None and says.workdir is None
            says.base, says.workdir = (None if rest == "scratch" else rest), None
            return first and len(rest.split()) == 1
        case "WORKDIR":
            says.workdir = posixpath.normpath(posixpath.join(says.workdir or "/", rest.strip("\"'")))
        case "ENV":
            return _set_env(rest, says)
        case "COPY":
            return _copy(rest, says, folder)
        case _:
            return False
    return True


def _set_env(rest: str, says: Dockerfile) -> bool:
    words = shlex.split(rest)
    if words and all("=" in word for word in words):
        says.env.update((name, value) for name, _, value in (word.partition("=") for word in words))
    elif len(words) >= 2:
        says.env[words[0]] = rest.split(None, 1)[1]
    else:
        return False
    return True


def _copy(rest: str, says: Dockerfile, folder: Path) -> bool:
    words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    if len(words) < 2 or any(word.startswith("--") or set(word) & set("*?[") for word in words):
        return False
    *sources, target = words
    place = posixpath.normpath(posixpath.join(says.workdir or "/", target))
    for name in sources:
        source = (folder / name.lstrip("/")).resolve()
        if not source.exists() or not source.is_relative_to(folder.resolve()):
            return False
        into = source.is_file() and (target.endswith(("/", ".")) or len(sources) > 1)
        says.files[posixpath.join(place, source.name) if into else place] = source
    return True


_VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
_SIZE = re.compile(r"([0-9.]+)\s*([GMK])", re.IGNORECASE)
_MEBIBYTES = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}


def _megabytes(value: object) -> object:
    """Read sizes as older tasks write them: `2G`, `512M`."""
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    return float(match[1]) * _MEBIBYTES[match[2].upper()] if match else value


_Megabytes = Annotated[float | None, BeforeValidator(_megabytes), Field(ge=1, le=1 << 30)]
_Anything = Any  # a key that is refused when it has a value


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Network(_Table):
    network_mode: Literal["no-network", "public", "allowlist"] | None = None
    allowed_hosts: list[str] | None = None


class _Agent(_Network):
    timeout_sec: Seconds | None = None
    user: _Anything = None


class _Environment(_Network):
    build_timeout_sec: Seconds = 600.0
    docker_image: str | None = None
    os: str = "linux"
    cpus: Cores | None = None
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

    schema_version: str = Field(default="1.4", validation_alias=AliasChoices("schema_version", "version"))
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
        found: list[tuple[str, object]] = [("steps", self.steps)]
        names = ("gpus", "gpu_types", "tpu", "mcp_servers", "skills_dir", "healthcheck")
        found += [(f"environment.{name}", getattr(self.environment, name)) for name in names]
        if self.environment.os.lower() != "linux":
            found.append(("environment.os", self.environment.os))
        found.append(("agent.user", self.agent.user))
        found += [(f"verifier.{name}", getattr(self.verifier, name)) for name in ("user", "environment", "collect")]
        if self.verifier.environment_mode == "shared":  # Harbor's default; set, it asks for the agent's box
            found.append(("verifier.environment_mode", "shared"))
        return [f"{key!r} = {str(value)[:100]}" for key, value in found if value not in (None, 0, [], {})]

    def network(self) -> str | None:
        """Return the key that asks for a network; None when none does. Harbor's default does not ask."""
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
                raise InputError(f"the artifact {source} is outside the work folder {workdir}: only that is kept")
            name = str(place.relative_to(workdir))
            patterns += ["**"] if name == "." else [name, f"{name}/**"]
        return patterns


def resolve_variables(values: Mapping[str, str], file: Path) -> dict[str, str]:
    """Return variables with `${NAME}` and `${NAME:-default}` filled in. Raises `InputError` for one that is not set."""
    resolved: dict[str, str] = {}
    for key, value in values.items():
        match = _VARIABLE.fullmatch(value)
        found = os.environ.get(match[1], match[2]) if match else value
        if found is None:
            raise InputError(f"{file}: the variable {key} needs {value}, which is not set: set it in the environment")
        resolved[key] = found
    return resolved


_WORKDIR = "/app"
_LOGS = "/logs/verifier"
_CANARY = re.compile(r"^(<!--.*canary.*-->|#.*canary.*)$", re.IGNORECASE)
_DOWNLOADS = re.compile(
    r"\b(apt-get|apt|apk|yum|dnf|curl|wget|uvx|npx)\b|\b(pip3?|uv|npm|cargo|go|conda) (\w+ )*install\b|\bgit clone\b"
)


def is_harbor(folder: Path) -> bool:
    """Return whether a folder is a Harbor task."""
    return (folder / "task.toml").is_file()


def load_harbor(folder: Path) -> Task:
    """Return the task of a Harbor folder. The judge runs `tests/test.sh`, mounted at /tests, in a fresh box.

    Files that the Dockerfile copies into its work folder are laid into the workspace, and an image that is a plain
    operating system or Python is optional. A Dockerfile that needs a build is the task's `build`. A verifier with
    `environment_mode = "separate"` gets the declared artifacts only, others get all changes of the work folder; what
    the agent changed elsewhere in its box is not judged.

    Raises pydantic's `ValidationError`, and `InputError`, which names the files and keys, for what is missing, and for
    what Harbor has and rolltap has not: several steps, other services, users, GPUs, MCP servers,
    skills, health checks, a verifier's own image or the agent's box for it, Windows.
    """
    folder = folder.resolve()
    file = folder / "task.toml"
    config = load_toml(file, HarborConfig)
    if faults := _faults(folder, config):
        raise InputError(f"{folder}: {'; '.join(faults)}")
    environment = _environment(folder, config)
    solution = folder / "solution"
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
        needs_network=config.network() or _download(folder / "tests"),
        judge=_judge(folder, config, environment.workdir),
        solution=solution if (solution / "solve.sh").is_file() else None,
        source=str(folder),
    )


def _faults(folder: Path, config: HarborConfig) -> list[str]:
    """Return the parts of a folder that are missing, and those that rolltap cannot have."""
    faults = []
    if refusals := config.refusals():
        faults.append(f"task.toml: rolltap cannot have {', '.join(refusals)}: remove it from the task")
    unusable = ["environment/docker-compose.yaml", "trajectory.json"]
    if config.verifier.environment_mode == "separate":
        unusable.append("tests/Dockerfile")
    found = [name for name in unusable if (folder / name).exists()]
    faults += [f"{name}: rolltap cannot use it: remove it from the task" for name in found]
    if not (folder / "instruction.md").is_file():
        faults.append("instruction.md is missing: it is what the agent is told")
    if not (folder / "tests" / "test.sh").is_file():
        faults.append("tests/test.sh is missing: it judges the task")
    if config.environment.docker_image is None and not (folder / "environment" / "Dockerfile").is_file():
        faults.append("give environment/Dockerfile, or 'environment.docker_image' in task.toml")
    return faults


class _FoundEnvironment(NamedTuple):
    """An image or its build, and what lies over its files in the work folder. `optional` as `Task.image_optional`."""

    image: str | None
    optional: bool
    workdir: str
    files: dict[str, Path]
    env: dict[str, str]
    build: Build | None = None


def _environment(folder: Path, config: HarborConfig) -> _FoundEnvironment:
    source = folder / "environment"
    image = config.environment.docker_image
    if image is not None and not (source / "Dockerfile").is_file():
        loose = {".": source} if source.is_dir() and any(source.iterdir()) else {}
        return _FoundEnvironment(image, is_plain_system(image), config.environment.workdir or _WORKDIR, loose, {})
    says = read_dockerfile(source / "Dockerfile")
    workdir = config.environment.workdir or says.workdir or _WORKDIR
    outside = [place for place in says.files if not PurePosixPath(place).is_relative_to(workdir)]
    unclear = says.unclear or (f"COPY to {outside[0]}, outside the work folder {workdir}" if outside else None)
    if unclear is None and (image is None or says.base is None or is_plain_system(says.base)):
        files = {str(PurePosixPath(place).relative_to(workdir)): file for place, file in says.files.items()}
        optional = says.base is None or is_plain_system(says.base)
        return _FoundEnvironment(image or says.base, optional, workdir, files, says.env)
    if image is not None:
        return _FoundEnvironment(image, False, workdir, {}, {})
    build = Build(folder=source, timeout=config.environment.build_timeout_sec, why=unclear or "")
    return _FoundEnvironment(None, False, workdir, {}, {}, build)


def _instruction(folder: Path) -> str:
    """Return the instruction without the canary lines at its beginning, as Harbor gives it to an agent."""
    file = folder / "instruction.md"
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {file}: {error}") from error
    return "\n".join(dropwhile(lambda line: _CANARY.match(line.strip()), lines)).strip()


def _judge(folder: Path, config: HarborConfig, workdir: str) -> CommandJudge:
    script = folder / "tests" / "test.sh"
    first = script.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    # the script is mounted as it is, perhaps without its executable bit
    program = shlex.split(first[2:]) if first.startswith("#!") else ["bash"]
    separate = config.verifier.environment_mode == "separate"
    return CommandJudge(
        command=[*program, "/tests/test.sh"],
        run=config.metadata.rolltap.run,
        timeout=config.verifier.timeout_sec,
        paths=config.artifact_paths(workdir) if separate else None,
        # the script's exit status says nothing
        reward_files=[f"{_LOGS}/reward.txt", f"{_LOGS}/reward.json"],
        mounts={"/tests": folder / "tests"},
        writable=[_LOGS],
        env=resolve_variables(config.verifier.env, folder / "task.toml"),
    )


def _download(tests: Path) -> str | None:
    """Return the first line of the tests' shell scripts that downloads something; None without one.

    Such a script without network mostly writes the reward 0, which would be taken for the agent's.
    """
    for script in sorted(tests.rglob("*.sh")):
        for number, line in enumerate(script.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            if _DOWNLOADS.search(line.partition("#")[0]):
                return f"{script}, line {number}: {line.strip()[:100]}"
    return None
