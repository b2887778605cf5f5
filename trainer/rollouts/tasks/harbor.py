"""Harbor task folders as tasks.

The format is that of Harbor 0.25 (https://harborframework.com/docs/task-format): task.toml, instruction.md,
environment/, tests/test.sh, and solution/, which no session sees.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pydantic import ValidationError

from rolltap.addons.errors import InputError
from rolltap.trainer.rollouts.judges.spec import CommandJudge
from rolltap.trainer.rollouts.tasks.dockerfile import is_plain_system, read_dockerfile
from rolltap.trainer.rollouts.tasks.harbor_config import HarborConfig, resolve_variables
from rolltap.trainer.rollouts.tasks.task import Task
from rolltap.trainer.settings import describe, load_toml

_WORKDIR = "/app"
_LOGS = "/logs/verifier"
# the reward is reward.json when there is one, else reward.txt; the script's exit status says nothing
_RUN_TESTS = f'"$@"; if [ -e {_LOGS}/reward.json ]; then cp {_LOGS}/reward.json {_LOGS}/reward.txt; fi'
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
    operating system or Python is optional. A verifier with `environment_mode = "separate"` gets the declared artifacts
    only, others get all changes of the work folder; what the agent changed elsewhere in its box is not judged.

    Raises `InputError`, which names the files and keys, for what is missing, and for what Harbor has and rolltap has
    not: images to build, several steps, other services, users, GPUs, MCP servers, skills, health checks, a verifier's
    own image or the agent's box for it, Windows.
    """
    folder = folder.resolve()
    file = folder / "task.toml"
    config = load_toml(file, HarborConfig)
    if faults := _faults(folder, config):
        raise InputError(f"{folder}: {'; '.join(faults)}")
    environment = _environment(folder, config)
    try:
        return Task(
            id=folder.name,
            instruction=_instruction(folder),
            files=environment.files,
            image=environment.image,
            image_optional=environment.optional,
            workdir=environment.workdir,
            timeout=config.agent.timeout_sec,
            limits=config.environment.limits(),
            env={**environment.env, **resolve_variables(config.environment.env, file)},
            needs_network=config.network() or _download(folder / "tests"),
            judge=_judge(folder, config, environment.workdir),
            source=str(folder),
        )
    except ValidationError as error:
        raise InputError(f"{folder}: {describe(error)}") from error


def _faults(folder: Path, config: HarborConfig) -> list[str]:
    """Return the parts of a folder that are missing, and those that rolltap cannot have."""
    faults = []
    if refusals := config.refusals():
        faults.append(f"task.toml: rolltap cannot have {', '.join(refusals)}: remove it from the task")
    unusable = ["environment/docker-compose.yaml", "trajectory.json"]
    if config.verifier.environment_mode == "separate":
        unusable.append("tests/Dockerfile")
    faults += [
        f"{name}: rolltap cannot use it: remove it from the task" for name in unusable if (folder / name).exists()
    ]
    if not (folder / "instruction.md").is_file():
        faults.append("instruction.md is missing: it is what the agent is told")
    if not (folder / "tests" / "test.sh").is_file():
        faults.append("tests/test.sh is missing: it judges the task")
    if config.environment.docker_image is None and not (folder / "environment" / "Dockerfile").is_file():
        faults.append("give environment/Dockerfile, or 'environment.docker_image' in task.toml")
    return faults


@dataclass(frozen=True, slots=True)
class _Environment:
    """An image, and what lies over its files in the work folder. `optional` as `Task.image_optional`."""

    image: str | None
    optional: bool
    workdir: str
    files: dict[str, Path]
    env: dict[str, str]


def _environment(folder: Path, config: HarborConfig) -> _Environment:
    source = folder / "environment"
    image = config.environment.docker_image
    if image is not None and not (source / "Dockerfile").is_file():
        loose = {".": source} if source.is_dir() and any(source.iterdir()) else {}
        return _Environment(image, is_plain_system(image), config.environment.workdir or _WORKDIR, loose, {})
    says = read_dockerfile(source / "Dockerfile")
    workdir = config.environment.workdir or says.workdir or _WORKDIR
    outside = [place for place in says.files if not PurePosixPath(place).is_relative_to(workdir)]
    unclear = says.unclear or (f"COPY to {outside[0]}, outside the work folder {workdir}" if outside else None)
    if unclear is None and (image is None or says.base is None or is_plain_system(says.base)):
        files = {str(PurePosixPath(place).relative_to(workdir)): file for place, file in says.files.items()}
        optional = says.base is None or is_plain_system(says.base)
        return _Environment(image or says.base, optional, workdir, files, says.env)
    if image is not None:
        return _Environment(image, False, workdir, {}, {})
    raise InputError(
        f"{source / 'Dockerfile'}, {unclear}: this needs an image to be built: run `podman build -t NAME {source}`, "
        "set 'environment.docker_image' to NAME in task.toml, and use the runtime container"
    )


def _instruction(folder: Path) -> str:
    """Return the instruction without the canary lines at its beginning, as Harbor gives it to an agent."""
    file = folder / "instruction.md"
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {file}: {error}") from error
    begin = 0
    while begin < len(lines) and _CANARY.match(lines[begin].strip()):
        begin += 1
    return "\n".join(lines[begin:]).strip()


def _judge(folder: Path, config: HarborConfig, workdir: str) -> CommandJudge:
    script = folder / "tests" / "test.sh"
    first = script.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    # the script is mounted as it is, perhaps without its executable bit
    program = shlex.split(first[2:]) if first.startswith("#!") else ["bash"]
    separate = config.verifier.environment_mode == "separate"
    return CommandJudge(
        command=["sh", "-c", _RUN_TESTS, "sh", *program, "/tests/test.sh"],
        timeout=config.verifier.timeout_sec,
        paths=config.artifact_paths(workdir) if separate else None,
        reward_file=f"{_LOGS}/reward.txt",
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
