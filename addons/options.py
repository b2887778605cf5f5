"""Options of mitmdump that are wrong: names that nobody declares, and values of another type."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mitmproxy import optmanager
from mitmproxy.exceptions import OptionsError
from mitmproxy.optmanager import OptManager

from rolltap.addons.option_names import PREFIX, unknown

_FILES = ("config.yaml", "config.yml")
"""Names of mitmproxy's configuration file in its folder, all of which it reads."""


def unknown_options(options: OptManager) -> list[str]:
    """Return a refusal of each option that no addon declares, with the nearest that one does.

    mitmproxy would wait for an addon that does. Not refused are names without `PREFIX` if another script is loaded,
    which may declare them later, and those in mitmproxy's configuration file, which its other programs read as well.
    """
    known = options.keys()
    names = [name for name in options.deferred if name not in known]
    others = set(names) if len(options.scripts) > 1 else _in_files(Path(options.confdir))
    return [unknown(name, known) for name in names if name.startswith(PREFIX) or name not in others]


def wrong_values(options: OptManager) -> list[str]:
    """Return a refusal of each value that was given to an option and is not of its type. They are not set yet."""
    return [refusal for name in options.deferred if name in options for refusal in _wrong(options, name)]


def _wrong(options: OptManager, name: str) -> Iterator[str]:
    alone, option, value = OptManager(), dict(options.items())[name], options.deferred[name]
    alone.add_option(name, option.typespec, option.default, option.help)
    alone.deferred[name] = value
    try:
        alone.process_deferred()
    except (OptionsError, TypeError) as error:
        yield f"{name} is {_written(value)}: {error}"


def _written(value: Any) -> str:
    """Return a value as the user wrote it: mitmproxy keeps the texts of `--set` in a type of its own."""
    return ", ".join(map(repr, getattr(value, "val", [value])))


def _in_files(folder: Path) -> set[str]:
    found = OptManager()
    optmanager.load_paths(found, *(folder / name for name in _FILES))
    return set(found.deferred)
