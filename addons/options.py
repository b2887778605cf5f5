"""Options of mitmdump that are wrong: names that nobody declares, and values of another type."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mitmproxy import optmanager
from mitmproxy.addonmanager import Loader
from mitmproxy.exceptions import OptionsError
from mitmproxy.options import Options
from mitmproxy.optmanager import OptManager

from rolltap.addons.option_names import PREFIX, TYPES, unknown

_FILES = ("config.yaml", "config.yml")
"""Names of mitmproxy's configuration file in its folder, all of which it reads."""


def refusals(given: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a refusal of each option that a recorder cannot be started with. `given` is name -> values as text.

    mitmdump itself refuses values of its own options without their names.
    """
    options, texts = declared(), OptManager()
    texts.set(*(f"{name}={value}" for name, values in given.items() for value in values), defer=True)
    options.deferred.update(texts.deferred)
    return [*unknown_options(options), *wrong_values(options)]


def declared() -> OptManager:
    """Return all options of mitmdump with the recorder's addons, with mitmproxy's defaults."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of packages that they import
        from mitmproxy.addons import default_addons
        from mitmproxy.addons.dumper import Dumper
        from mitmproxy.addons.keepserving import KeepServing
        from mitmproxy.addons.readfile import ReadFileStdin
        from mitmproxy.addons.termlog import TermLog

    options = Options()
    loader = Loader(SimpleNamespace(options=options))
    log = TermLog()
    log.uninstall()  # it writes what others log
    for addon in [*default_addons(), Dumper(), KeepServing(), ReadFileStdin(), log]:
        if hasattr(addon, "load"):
            addon.load(loader)
    for name, kind in TYPES.items():
        options.add_option(name, kind, [] if kind == Sequence[str] else kind(), "")
    return options


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
