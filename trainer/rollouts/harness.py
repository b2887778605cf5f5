"""A harness: the command line and environment of an unmodified agent program, as data."""

import logging
import os
import shlex
import shutil
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from rolltap.addons.errors import InputError
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.toml import load_toml

logger = logging.getLogger(__name__)

_PRESETS = resources.files("rolltap.harnesses")
_WINDOW = "{max_model_len}"
_BESIDE = ("./", "../")
"""Beginnings of words that are paths relative to the preset's file."""


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
        return sorted(
            Path(file.name).stem for file in _PRESETS.iterdir() if file.name.endswith(".toml")
        )

    def _beside(self, file: Path) -> Self:
        """Return the harness with the absolute paths of what lies beside its file. Raises
        `InputError` for a path."""
        files: list[Path] = []

        def resolve(word: str) -> str:
            path = Path(os.path.normpath(file.parent / word))
            if not word.startswith(_BESIDE):
                is_here = not os.path.isabs(word) and os.path.isfile(
                    path
                )  # False for a text too long for a path
                if is_here:
                    logger.warning(
                        "%s: %r does not name the file beside it: write './%s' for that",
                        file,
                        word,
                        word,
                    )
                return word
            if not path.exists():
                raise InputError(
                    f"{file}: {word!r} is {path}, which does not exist: correct the path"
                )
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
        return sha256(text.encode()).hexdigest()

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
        window = str(context_window or EngineAdmin(engine_url.split(",")[0]).models().max_model_len)
        return {name: value.replace(_WINDOW, window) for name, value in self.env.items()}
