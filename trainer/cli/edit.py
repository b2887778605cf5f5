"""`rolltap filter`: writes some sessions of a run to a new one.

`rolltap import`: writes calls that another program made as a run.

`rolltap merge`: joins several runs, or saves what can be read of a damaged one.

`rolltap split`: a run as several.
"""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, get_args

import click

import rolltap
from rolltap.runs import CallRole, SessionStatus, SplitBy
from rolltap.trainer.cli.options import (
    FOLDER,
    RUN,
    Command,
    command,
    counts_of,
    json_option,
    new_folder_option,
    print_json,
    print_result,
)
from rolltap.trainer.console import plain_console
from rolltap.trainer.names import counted

_RULE = "Name of a rule that the session matched, as `rolltap inspect` shows it."


def _accepted(
    flag: str,
    name: str,
    help: str,
    **how: Any,
) -> Callable[[Command], Command]:
    """Return an option of accepted values."""
    return click.option(flag, name, multiple=True, help=f"{help} Repeatable.", **how)


@command(
    "filter",
    "rolltap filter runs/first --min-reward 1 --out runs/solved",
    "rolltap filter runs/first --not-suspicious --out runs/sound",
)
@click.argument("run", type=RUN)
@new_folder_option
@click.option("--min-reward", type=float, help="Smallest reward of a session.")
@click.option("--max-reward", type=float, help="Largest reward of a session.")
@_accepted("--harness", "harnesses", "Name of the harness.")
@_accepted("--policy-version", "policy_versions", "Weights of the session's first sampled token.")
@_accepted("--status", "statuses", "Session status.", type=click.Choice(get_args(SessionStatus)))
@_accepted("--task", "tasks", "Name of the task.", metavar="ID")
@_accepted("--runtime", "runtimes", "Where the session ran, such as sandbox.", metavar="NAME")
@click.option(
    "--suspicious/--not-suspicious",
    default=None,
    help="Sessions with, or without, evidence of cheating. `rolltap inspect` shows it.",
)
@_accepted("--suspicion", "suspicions", _RULE, metavar="RULE")
@_accepted("--session", "session_ids", "Session id.", metavar="ID")
@_accepted(
    "--role",
    "roles",
    "Keep only calls of this role, and the calls that their prompts continue. A session without a "
    "call of these roles is left out.",
    type=click.Choice(get_args(CallRole)),
)
@json_option
def filter_command(
    run: Path,
    out: Path,
    as_json: bool,
    **criteria: Any,
) -> None:
    """Write some sessions of a RUN to a new run.

    They are those that meet every given criterion. An option that is given several times accepts
    each of its values. A session without a row has the status unknown, no harness, no policy
    version, no suspicions and no reward. Events without a session are left out.
    """
    run_of_them = rolltap.open_run(run).filter(out, **criteria)
    if as_json:
        return print_json(counts_of(run_of_them))
    click.echo(f"{counted(len(run_of_them.sessions()), 'session')} in {out}")


_FIELDS: dict[str, SplitBy] = {name.removesuffix("_id"): name for name in get_args(SplitBy)}
_FIELDS |= {name: name for name in get_args(SplitBy)}
"""Field to split by, also by its name without `_id`, as the options of `filter` have it."""
MOST_FAULTS = 20
"""Most bad lines that are printed. The rest is counted."""


@command(
    "import",
    "rolltap import calls.jsonl runs/imported",
    "zcat calls.jsonl.gz | rolltap import - runs/imported --skip-bad",
)
@click.argument("file", type=click.File("rb"))
@click.argument("run", type=FOLDER)
@click.option(
    "--model",
    help="Folder or name of the model whose tokens they are: its tokenizer is noted in the run.",
)
@click.option("--skip-bad", is_flag=True, help="Leave bad lines out and import the others.")
@json_option
def import_command(
    file: BinaryIO,
    run: Path,
    model: str | None,
    skip_bad: bool,
    as_json: bool,
) -> None:
    """Write calls that another program made to a new RUN.

    FILE is JSON Lines, `-` the standard input. `rolltap merge` adds the new run to another one.
    With --model, only to one with the same tokenizer and chat template.

    \b
    A line is a call, with the keys
      session_id, call_id   names of your own
      prompt_ids            token ids of the whole prompt
      completion_ids        sampled token ids, and their
      logprobs              natural-log probabilities, or null
      finish_reason         a text or null
    and, as far as they are known,
      task_id, group_id, harness, reward   of the session: the same in all its lines
      started_at            ISO 8601; without it calls are in the order of their prompts' lengths
      role                  agent, subagent, compaction or auxiliary
      status                completed, aborted or failed
      parent_id             decides between calls with the same tokens
      policy_version        the weights that sampled the call

    Bad lines are printed with their number, and nothing is imported. Of two lines that contradict
    each other the later one is bad. A call whose tokens and log-probabilities do not match is not a
    bad line: it is kept, marked and not trained on. The run appears when it is complete: an import
    that is killed leaves none.
    """
    console = plain_console()
    faults = 0

    def report(number: int, fault: str) -> None:
        nonlocal faults
        faults += 1
        if faults <= MOST_FAULTS:
            console.print(f"line {number}: {fault}")

    try:
        summary = rolltap.import_calls(file, run, model=model, skip_bad=skip_bad, report=report)
    finally:
        if faults > MOST_FAULTS:
            console.print(f"and {faults - MOST_FAULTS} more bad lines")
    print_result(summary, as_json)


@command(
    "merge",
    "rolltap merge runs/first runs/second --out runs/both",
    "rolltap merge runs/damaged --out runs/saved",
)
@click.argument("runs", type=RUN, nargs=-1, required=True)
@new_folder_option
@json_option
def merge_command(runs: tuple[Path, ...], out: Path, as_json: bool) -> None:
    """Write the sessions of several RUNS to one.

    The runs must have the same tokenizer and chat template. When two runs have sessions or groups
    of equal names, the names of the later run get its folder's name as a prefix. The same session
    twice is an error. Rows that cannot be read or whose digest does not match are not copied, and
    counted. With a single damaged run, this saves its sound rows.
    """
    run, left_behind = rolltap.merge_runs(runs, out)
    if as_json:
        origins = run.metadata["merged_from"]
        losses = [asdict(loss) for loss in left_behind]
        return print_json({**counts_of(run), "merged_from": origins, "not_copied": losses})
    for origin in run.metadata["merged_from"]:
        if prefix := origin.get("prefix"):
            click.echo(
                f"sessions and groups of {origin['run']} are named {prefix}... : another run has"
                " equal names",
            )
    for loss in left_behind:
        click.echo(
            f"not copied from {loss.file}: {loss.rows} rows whose digest does not match, "
            f"{loss.unreadable_ranges} unreadable byte ranges"
        )
    click.echo(f"{counted(len(run.sessions()), 'session')} in {out}")


@command(
    "split",
    "rolltap split runs/first --by harness --out runs/parts",
    "rolltap split runs/first --parts 4 --out runs/parts",
)
@click.argument("run", type=RUN)
@new_folder_option
@click.option(
    "--by",
    type=click.Choice(sorted(_FIELDS)),
    help="Write one run for each value of this field of the sessions.",
)
@click.option(
    "--parts",
    type=click.IntRange(1),
    metavar="N",
    help="Write N runs with about the same number of sessions. No group is divided.",
)
@json_option
def split_command(
    run: Path,
    out: Path,
    by: str | None,
    parts: int | None,
    as_json: bool,
) -> None:
    """Write the sessions of a RUN to several runs.

    They are folders in --out, named after their part. Events without a session go to the first
    part.
    """
    if (by is None) == (parts is None):
        raise click.UsageError("give either --by or --parts")
    written = rolltap.open_run(run).split(out, by=_FIELDS.get(by or ""), parts=parts)
    if as_json:
        return print_json({"parts": {name: counts_of(part) for name, part in written.items()}})
    for name, part in written.items():
        click.echo(f"{counted(len(part.sessions()), 'session')} in {out / name}")
