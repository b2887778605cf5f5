"""A harness: the command line and environment of an unmodified agent program, as data."""

import shutil
from importlib import resources
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from rolltap.addons.errors import InputError
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.settings import load_toml

_PRESETS = resources.files("rolltap.harnesses")
_WINDOW = "{max_model_len}"


class Harness(BaseModel):
    """A preset: one of those that rolltap brings (`recipes/harnesses`), or a TOML file of the user's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1)
    """Names the harness in the dataset."""
    version: str
    """The version that this preset was tested with."""
    install: str = ""
    """The command that installs this version."""
    program: str = Field(min_length=1)
    """The program to start."""
    arguments: list[str] = []
    """Arguments that it always gets, before all others."""
    headless: list[str]
    """Arguments with which it works on one instruction, uses its tools without asking, also as root, and ends.
    `{instruction}` stands for the instruction."""
    env: dict[str, str] = {}
    """Variables that it needs: a placeholder key where it refuses to start without one, telemetry and update checks
    off. `{max_model_len}` stands for the engine's context window in tokens."""
    quirks: list[str] = []
    """Facts for a person who runs it."""

    def command_for(self, instruction: str) -> list[str]:
        """The command line of one headless session."""
        headless = [argument.replace("{instruction}", instruction) for argument in self.headless]
        return [self.program, *self.arguments, *headless]

    def environment(self, engine_url: str) -> dict[str, str]:
        """`env` with the context window of the engine, which is asked only if need be; of several engines, by commas,
        the first is asked. Raises `InputError`."""
        if not any(_WINDOW in value for value in self.env.values()):
            return self.env
        window = str(EngineAdmin(engine_url.split(",")[0]).models().max_model_len)
        return {name: value.replace(_WINDOW, window) for name, value in self.env.items()}


def harness_names() -> list[str]:
    """The presets that rolltap brings."""
    return sorted(Path(file.name).stem for file in _PRESETS.iterdir() if file.name.endswith(".toml"))


def load_harness(name: str) -> Harness:
    """The preset with this name, or in this file if it ends in `.toml`. Raises `InputError`."""
    if not name.endswith(".toml") and name not in harness_names():
        raise InputError(f"no harness is named {name!r}: choose {', '.join(harness_names())}, or give a .toml file")
    file = Path(name) if name.endswith(".toml") else _PRESETS / f"{name}.toml"
    return load_toml(file, Harness)


def require_program(program: str, install: str = "") -> None:
    """Raise `InputError` unless `program` can be started. `install` is the command that installs it."""
    if shutil.which(program) is None:
        how = f" ({install})" if install else ""
        raise InputError(f"{program!r} is not on the PATH: install it{how}, or give its folder with PATH=...:$PATH")
