"""Options that several commands share, and printing of results."""

import fnmatch
import json
import os
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, get_args, get_origin

import click
from rich.console import Console

import rolltap
from rolltap.trainer.console import runs_first

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

Command = TypeVar("Command", bound=Callable[..., Any])


_OF_A_RUN = (
    "run.json",
    "rollout.lock",
    "training.json",
    "policy.json",
    "service.jsonl",
    "service.token",
    "recorders.lock",
    "recorder.log",
    "recorder-*.log",
)
"""Patterns of the files that a run folder has, one at least, from its begin on: the recorder's log
alone, when the recorder did not start."""


class OutFolder(click.Path):
    """A folder that can be made, is empty, or has a run."""

    def convert(
        self,
        value: Any,
        parameter: click.Parameter | None,
        context: click.Context | None,
    ) -> Any:
        """Return the path. What is wrong with the nearest folder that exists is wrong with it."""
        path = Path(value).absolute()
        nearest = path
        while not os.path.lexists(nearest):
            nearest = nearest.parent
        super().convert(nearest, parameter, context)
        if runs_first() and path.is_dir() and _has_only_other_files(path):
            self.fail(
                f"{str(value)!r} has other files and no run: give a new folder",
                parameter,
                context,
            )
        return self.coerce_path_result(value)


def _has_only_other_files(folder: Path) -> bool:
    names = [file.name for file in folder.iterdir()]
    for pattern in _OF_A_RUN:
        if fnmatch.filter(names, pattern):
            return False
    return bool(names)


_KEY_FILE = "ROLLTAP_ENGINE_KEY_FILE"
FOLDER = click.Path(path_type=Path, file_okay=False)
OUT = OutFolder(path_type=Path, file_okay=False, writable=True)
_READS = runs_first()
"""Other processes of a launcher, on whatever machines, get what the first one has read."""
RUN = click.Path(path_type=Path, file_okay=False, exists=_READS)
FILE = click.Path(path_type=Path, dir_okay=False, exists=_READS)
TASKS = click.Path(path_type=Path, exists=True)
PORT = click.IntRange(0, 65535)

new_folder_option = click.option(
    "--out",
    type=OUT,
    required=True,
    help="The folder to write. It must be new or empty.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


def command(name: str, *lines: str, **how: Any) -> Callable[[Callable[..., None]], click.Command]:
    """Make a function the command `name`, whose help ends with examples: the `lines`."""
    return click.command(name, epilog=examples(*lines), **how)


def examples(*lines: str) -> str:
    """Return the epilog of a command's help: command lines that a user can copy, as they are
    written here."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def harness_option(**how: Any) -> Callable[[Command], Command]:
    """Add --harness."""
    help = f"A preset: {', '.join(rolltap.Harness.names())}, or a .toml file of your own."
    return click.option("--harness", "preset", metavar="NAME", help=help, **how)


def engine_option(
    help: str = "URL of the vLLM server; separate several with commas.",
) -> Callable[[Command], Command]:
    """Add --engine, described by `help`, and --engine-key-file."""
    url = click.option(
        "--engine",
        envvar="ROLLTAP_ENGINE",
        show_envvar=True,
        default="http://127.0.0.1:8000",
        show_default=True,
        help=help,
    )
    key = engine_key_option()
    return lambda command: url(key(command))


def engine_key_option(
    help: str = "File with the engine's key, as `rolltap serve` names it.",
) -> Callable[[Command], Command]:
    """Add --engine-key-file, described by `help`.

    Its value goes to the environment variable, which all parts read.
    """
    return click.option(
        "--engine-key-file",
        envvar=_KEY_FILE,
        show_envvar=True,
        type=click.Path(dir_okay=False),
        expose_value=False,
        callback=_use_key_file,
        help=help,
    )


def _use_key_file(context: click.Context, option: click.Parameter, file: str | None) -> None:
    if file is not None:
        os.environ[_KEY_FILE] = file


class Result(Protocol):
    """A result that `rich` can print."""

    def to_json(self) -> Any:
        """Return JSON values."""


def print_json(values: object) -> None:
    """Print JSON values to stdout, in one line."""
    click.echo(json.dumps(values))


def exit_unless(is_good: bool, status: int = 1) -> None:
    """End the command with a status unless its result is good."""
    if not is_good:
        sys.exit(status)


def print_result(result: Result, as_json: bool) -> None:
    """Print a result to stdout, for people or as JSON. Long lines are not wrapped."""
    if as_json:
        print_json(result.to_json())
    else:
        Console(soft_wrap=True).print(result, markup=False, highlight=False)


def counts_of(run: rolltap.Run) -> dict[str, Any]:
    """Return the folder of a run that was written and its counts, for --json."""
    summary = run.summary()
    calls = sum(summary.calls.values())
    sampled = summary.ledger.sampled
    return {
        "run": str(run.path),
        "sessions": len(summary.session_rows),
        "calls": calls,
        "sampled_tokens": sampled,
    }


def next_line(*arguments: object) -> str:
    """Return the line that names the command which a person may give next."""
    return f"next: {shlex.join(['rolltap', *map(str, arguments)])}"


def recorder_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add --out, --engine, --model and --set, the options of `record` and `rollout`."""
    out = click.option("--out", type=OUT, required=True, help="The run folder to record into.")
    return out(engine_option()(model_option(set_option(command))))


def rollout_options(
    command: Callable[..., None],
    only: Sequence[str] = (),
) -> Callable[..., None]:
    """Add an option for each field of `RolloutConfig` but `recorder`, which is --set, or for those
    in `only`.

    Type, default, bounds and help are the field's. Those of the budget are --max-calls and so on,
    and the command gets them as `budget`.
    """
    from rolltap.types import Budget, RolloutConfig  # most commands need none of it

    fields = dict(RolloutConfig.model_fields)
    if only:
        fields = {name: field for name, field in fields.items() if name in only}
        decorated = command
    else:
        del fields["budget"], fields["recorder"]
        fields |= {f"max_{name}": field for name, field in Budget.model_fields.items()}

        @wraps(command)
        def decorated(**given: Any) -> None:
            budget = {name: given.pop(f"max_{name}") for name in Budget.model_fields}
            command(**given, budget=budget)

    for name, field in reversed(fields.items()):
        decorated = _field_option(name, field)(decorated)
    return decorated


def _field_option(name: str, field: "FieldInfo") -> Callable[[Command], Command]:
    choices = get_args(field.annotation)
    kind, *_ = [each for each in (*choices, field.annotation) if each is not type(None)]
    bounds: dict[str, Any] = {}
    for bound in field.metadata:
        for limit in ("ge", "gt"):
            if hasattr(bound, limit):
                bounds[limit] = getattr(bound, limit)
    types: dict[Any, click.ParamType[Any]] = {
        int: click.IntRange(bounds.get("ge")),
        float: click.FloatRange(bounds.get("gt"), min_open=True),
        Path: FOLDER,
        str: click.STRING,
        bool: click.BOOL,
    }
    if not isinstance(kind, str):
        choices = get_args(kind)
    several = get_origin(field.annotation) is tuple
    help = field.description or ""
    if several:
        help += " Repeatable."
    return click.option(
        *_FLAGS.get(name, ("--" + name.replace("_", "-"),)),
        name,
        type=types.get(kind) or click.Choice(choices),
        default=field.default,
        show_default=True,
        multiple=several,
        is_flag=kind is bool,
        help=help,
    )


_FLAGS = {
    "sessions": ("-n", "--sessions"),
    "container_arguments": ("--container-argument",),
    "ssh_arguments": ("--ssh-argument",),
}
"""Flags of fields whose name is not the flag."""


def _values(
    context: click.Context,
    option: click.Parameter,
    settings: tuple[str, ...],
) -> dict[str, list[str]]:
    values: defaultdict[str, list[str]] = defaultdict(list)
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise click.BadParameter(f"{setting!r} is not written as NAME=VALUE")
        values[name].append(value)
    return values


set_option = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_values,
    help="Option of the recorder, such as rolltap_allow=pypi.org. Repeatable.",
)
model_option = click.option(
    "--model",
    required=True,
    help="Folder or name of the served model, for its tokenizer.",
)
