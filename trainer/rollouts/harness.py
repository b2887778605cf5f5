"""A harness: the command line and environment of an unmodified agent program, as data. Its
provenance: which program ran, in which version, described by which preset, in which image.

The harness's version is what the program itself reports. It is asked once for each image of a
rollout, in a box without network. The digest of the program is that of the file that PATH names,
through symbolic links, and of the files that the preset names: of a script that loads a package, it
tells the script and not the package, which the version tells.
"""

import asyncio
import hashlib
import logging
import os
import re
import shlex
import shutil
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from rolltap.addons.errors import InputError, RolltapError
from rolltap.addons.store.records import Session
from rolltap.trainer.boxes.environment import clean_environment
from rolltap.trainer.boxes.runtime import BoxSpec, Runtime
from rolltap.trainer.concurrency import Once
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.toml import load_toml

logger = logging.getLogger(__name__)

_PRESETS = resources.files("rolltap.harnesses")
_WINDOW = "{max_model_len}"
_BESIDE = ("./", "../")
"""Beginnings of words that are paths relative to the preset's file."""
_VERSION = re.compile(r"\bv?(\d+(?:\.\d+)+(?:[-+][0-9A-Za-z.+-]*[0-9A-Za-z])?)")
_ENDS_A_LINE = re.compile(_VERSION.pattern + r"$", re.MULTILINE)
_VERSION_SECONDS = 60.0
_MOST_OUTPUT = 4096


class Harness(BaseModel):
    """An agent program and how to start it. A preset (`recipes/harnesses`) is a TOML file with
    these fields as keys.

    A word of its command line that begins with `./` or `../` is the path of a file or folder,
    relative to the TOML file. Every box shows it, read-only. All other words stay as they are.

    The constructor raises pydantic's `ValidationError`, a `ValueError`, for wrong fields.

    Attributes:
        name: Names the harness in the dataset.
        version: Version of the program that the preset was tested with.
        install: The command that installs this version. It is shown if the program is missing.
        program: The program to start: a name that is looked up on the `PATH`, or a path.
        arguments: Arguments of every session, before all others.
        headless: Further arguments of one headless session: the program works on one instruction,
            uses its tools without asking, also as root, and exits. `{instruction}` is replaced by
            the instruction.
        env: Variables that it needs: a placeholder key if it refuses to start without one,
            telemetry and update checks off. `{max_model_len}` is replaced by the engine's context
            window in tokens.
        version_arguments: Arguments with which the program prints its version and exits.
        quirks: Facts that a person who runs the program should know.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1)
    version: str = ""
    install: str = ""
    program: str = Field(min_length=1)
    arguments: list[str] = []
    headless: list[str]
    env: dict[str, str] = {}
    version_arguments: list[str] = ["--version"]
    quirks: list[str] = []

    _files: tuple[Path, ...] = PrivateAttr(())

    @property
    def files(self) -> tuple[Path, ...]:
        """The files and folders that words of the command line name relative to the preset's
        file."""
        return self._files

    @classmethod
    def load(cls, name: str) -> Self:
        """Return the preset with this name, or the harness in this `.toml` file. Raises
        `InputError`."""
        if not name.endswith(".toml") and name not in cls.names():
            raise InputError(
                f"no harness is named {name!r}: choose {', '.join(cls.names())}, or give a .toml"
                " file"
            )
        if name.endswith(".toml"):
            return load_toml(Path(name), cls)._beside(Path(name).absolute())
        return load_toml(_PRESETS / f"{name}.toml", cls)

    @staticmethod
    def names() -> list[str]:
        """Return the names of the presets that rolltap brings."""
        files = [Path(file.name) for file in _PRESETS.iterdir()]
        return sorted(file.stem for file in files if file.suffix == ".toml")

    def _beside(self, file: Path) -> Self:
        """Return the harness with the absolute paths of what lies beside its file. Raises
        `InputError` for a path."""
        files: list[Path] = []

        def resolve(word: str) -> str:
            path = Path(os.path.normpath(file.parent / word))
            if not word.startswith(_BESIDE):
                # False for a text too long for a path
                if not os.path.isabs(word) and os.path.isfile(path):
                    what = f"{file}: {word!r} does not name the file beside it"
                    logger.warning("%s: write './%s' for that", what, word)
                return word
            if not path.exists():
                what = f"{file}: {word!r} is {path}, which does not exist"
                raise InputError(f"{what}: correct the path")
            files.append(path)
            return str(path)

        resolved = self.model_copy(
            update={
                "program": resolve(self.program),
                "arguments": [resolve(word) for word in self.arguments],
                "headless": [resolve(word) for word in self.headless],
                "version_arguments": [resolve(word) for word in self.version_arguments],
            }
        )
        resolved._files = tuple(files)
        return resolved

    def require_program(self) -> None:
        """Raise `InputError` unless `program` can be started."""
        if shutil.which(self.program) is not None:
            return
        file = Path(self.program)
        if file.is_file() and not os.access(file, os.X_OK):
            raise InputError(
                f"{self.program!r} is a file that cannot be run: chmod +x"
                f" {shlex.quote(self.program)}"
            )
        if file.is_file():
            raise InputError(
                f"{self.program!r} is not on the PATH, but in this folder: write ./{self.program}"
            )
        if file.name != self.program:
            raise InputError(f"there is no file {self.program!r}: correct its path")
        how = f" ({self.install})" if self.install else ""
        raise InputError(
            f"{self.program!r} is not on the PATH: install it{how}, or give its folder with"
            " PATH=...:$PATH"
        )

    def digest(self) -> str:
        """Return the SHA-256 of what decides how the program is started, wherever the preset's
        folder is."""
        text = self.model_dump_json(exclude={"install", "quirks"})
        for path in self.files:
            text = text.replace(str(path), path.name)
        return hashlib.sha256(text.encode()).hexdigest()

    def command_for(self, instruction: str) -> list[str]:
        """Return the command line of one headless session."""
        headless = [argument.replace("{instruction}", instruction) for argument in self.headless]
        return [self.program, *self.arguments, *headless]

    def environment(self, engine_url: str, context_window: int | None = None) -> dict[str, str]:
        """Return `env` with the engine's context window filled in.

        Unless that is given, the engine is asked, of several URLs with commas the first, if a
        variable needs it. Raises `EngineError`.
        """
        if not any(_WINDOW in value for value in self.env.values()):
            return self.env
        if context_window is None:
            first = EngineAdmin(engine_url.split(",")[0])
            context_window = first.models().max_model_len
        window = str(context_window)
        return {name: value.replace(_WINDOW, window) for name, value in self.env.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Fields of a session's row, as `Session` describes them. An empty one is not known."""

    harness_version: str = ""
    program_digest: str = ""
    preset_digest: str
    image_digest: str = ""

    def set_in(self, session: Session) -> None:
        """Set the fields in a session's row."""
        for name, value in asdict(self).items():
            setattr(session, name, value)


class Provenances:
    """The provenance of a harness in a runtime: one for each image. `work` is a folder for its
    boxes."""

    def __init__(self, harness: Harness, runtime: Runtime, work: Path) -> None:
        self._harness = harness
        self._runtime = runtime
        self._work = work
        self._known: Once[str | None, Provenance] = Once()

    async def of(self, image: str | None) -> Provenance:
        """Return the provenance of sessions in an image, or in none.

        Warns when the program's version is not the preset's. A program that does not tell its
        version has an empty one. Raises `InputError` for an image that cannot be had.
        """
        return await self._known.get(image, lambda: self._find(image))

    async def _find(self, image: str | None) -> Provenance:
        harness = self._harness
        image_digest = ""
        if image is not None:
            image_digest = await asyncio.to_thread(self._runtime.image_digest, image)
        version = await reported_version(harness, self._runtime, self._work, image)
        if version and harness.version and version != harness.version:
            how = f": install it with `{harness.install}`, or" if harness.install else ":"
            what = (
                f"has the version {version}, and its preset was tested with {harness.version}{how}"
            )
            why = "expect other prompts and tools; sessions of both versions are no fair comparison"
            logger.warning("the harness %s %s %s", harness.name, what, why)
        is_here = image is None and self._runtime.programs_here
        return Provenance(
            harness_version=version,
            program_digest=await asyncio.to_thread(_program_digest, harness, is_here),
            preset_digest=harness.digest(),
            image_digest=image_digest,
        )


async def reported_version(
    harness: Harness,
    runtime: Runtime,
    work: Path,
    image: str | None = None,
) -> str:
    """Return the version that a program prints, asked in a box below `work`; empty when it cannot
    be asked."""
    with TemporaryDirectory(dir=work, prefix="version-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        log = folder / "log"
        spec = BoxSpec(
            name=f"rolltap-{folder.name}",
            workspace=folder / "workspace",
            workdir="/workspace",
            home=folder / "home",
            image=image,
        )
        spec.workspace.mkdir()
        spec.home.mkdir()
        command = [harness.program, *harness.version_arguments]
        try:
            async with runtime.box(spec) as box:
                clean = clean_environment(Path(box.home), isolated=runtime.isolated)
                env = {**clean, **harness.env}
                ended = await box.run(command, env=env, timeout=_VERSION_SECONDS, log=log)
                await box.settle()
            if ended.status != 0:
                return ""
            return find_version(await asyncio.to_thread(_beginning, log))
        except (OSError, RolltapError) as error:
            logger.info("%s does not tell its version: %s", harness.program, error)
            return ""


def _beginning(log: Path) -> str:
    with log.open(errors="replace") as output:
        return output.read(_MOST_OUTPUT)


def find_version(output: str) -> str:
    """Return the first version number that ends a line of a program's output, else the first; empty
    without one.

    A program may print warnings of its libraries before its version, with other numbers in their
    sentences.
    """
    found = _ENDS_A_LINE.search(output) or _VERSION.search(output)
    return found[1] if found else ""


def _program_digest(harness: Harness, is_here: bool) -> str:
    """Return the SHA-256 of a program's file, and of the files that its preset names; empty without
    any.

    Of a folder its Python files count. A program of an image or of another machine, and absolute
    paths there, have no digest here.
    """
    files: list[Path] = []
    if is_here:
        program = os.path.abspath(shutil.which(harness.program) or "/")
        for word in (program, *harness.arguments, *harness.headless):
            if os.path.isabs(word) and os.path.isfile(word):
                files.append(Path(word))
    for path in harness.files:
        if path.is_dir():
            files += sorted(path.rglob("*.py"))
        else:
            files.append(path)
    digests = [_digest(path) for path in dict.fromkeys(files)]
    if len(digests) < 2:
        return "".join(digests)
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""
