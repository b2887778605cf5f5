"""`rolltap check`: compares recorded log-probabilities with a running engine's.

`rolltap export`: writes a run in other programs' formats.

`rolltap inspect`: shows a run, a session or a call.

`rolltap score`: stores the log-probabilities of another model in a run.

`rolltap traces`: builds the traces of a run.

`rolltap verify`: checks a run for damage.
"""

import json
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO, get_args

import click

import rolltap
from rolltap.errors import InputError
from rolltap.runs import TRAINED_ROLES, CallRole, ExportFormat, Sort, Strategy
from rolltap.trainer.cli.options import (
    OUT,
    RUN,
    command,
    counts_of,
    engine_option,
    exit_unless,
    json_option,
    print_json,
    print_result,
)
from rolltap.trainer.console import plain_console
from rolltap.trainer.names import counted

if TYPE_CHECKING:
    from rolltap.types import Verification


@command(
    "check",
    "rolltap check runs/first",
    "rolltap check runs/first --engine http://127.0.0.1:8000 --sample 20",
)
@click.argument("run", type=RUN)
@engine_option(help="URL of the vLLM server.")
@click.option(
    "--sample",
    default=100,
    show_default=True,
    type=click.IntRange(1),
    help="Maximum number of calls to score.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of the choice of calls.")
@click.option(
    "--threshold",
    type=click.FloatRange(0),
    help="Maximum mean absolute difference, in nats, for exit status 0. By default it follows from "
    "the type of the weights, and from the difference of the engine's own sampling from its "
    "scores, which is measured and printed.",
)
@json_option
def check_command(
    run: Path,
    engine: str,
    sample: int,
    seed: int,
    threshold: float | None,
    as_json: bool,
) -> None:
    """Score calls of a RUN again on a running engine.

    The log-probabilities of both times are compared.

    Exit status 0: the mean absolute difference of every kind of prompt and policy version is within
    the threshold. Exit status 1: one is not. Calls of weights that the engine does not serve are
    skipped and counted. So are those of the model that the engine was started with, unless run.json
    names the same one.
    """
    from rolltap.rollouts import Engines, engine_status

    opened = rolltap.open_run(run)
    for status in Engines(engine).each(engine_status):
        click.echo(str(status), err=True)
    report = opened.check(engine, sample=sample, seed=seed, threshold=threshold)
    print_result(report, as_json)
    exit_unless(report.within)


@command(
    "compare",
    "rolltap compare runs/first runs/second",
)
@click.argument("first", type=RUN)
@click.argument("second", type=RUN)
@json_option
def compare_command(first: Path, second: Path, as_json: bool) -> None:
    """Compare the mean rewards of two runs on the same tasks.

    The difference is paired by task and has an interval of 95 %: over tasks, or with fewer than
    five over the sessions of these tasks. An interval without 0 in it is a difference.
    """
    print_result(rolltap.open_run(first).compare(second), as_json)


@command(
    "export",
    "rolltap export runs/first --to parquet --out first-parquet",
    "rolltap export runs/first --to hub --repo me/first",
)
@click.argument("run", type=RUN)
@click.option(
    "--to",
    "target",
    type=click.Choice([*get_args(ExportFormat), "hub"]),
    required=True,
    help="parquet: a dataset for the Hub and its viewer. hub: the same, pushed. atif: Harbor's "
    "trajectories. messages: plain chats.",
)
@click.option("--out", type=OUT, help="Write into this folder, which must be new or empty.")
@click.option("--repo", metavar="ORG/NAME", help="The dataset repository that --to hub pushes to.")
@click.option("--public", is_flag=True, help="Create or update a public repository.")
@json_option
def export_command(
    run: Path,
    target: ExportFormat | Literal["hub"],
    out: Path | None,
    repo: str | None,
    public: bool,
    as_json: bool,
) -> None:
    """Write a RUN in another format, or push it to the Hub.

    The Hub's token is that of `hf auth login` or HF_TOKEN. A repository that is public already is
    refused without --public. Former Parquet files and the card of the repository are replaced.
    """
    opened = rolltap.open_run(run)
    console = plain_console()
    if target == "hub":
        if repo is None or out is not None:
            raise click.UsageError("--to hub takes --repo ORG/NAME, and no --out")
        url = opened.push_to_hub(repo, public=public)
        if as_json:
            return print_json({**counts_of(opened), "url": url})
        return console.print(f"{run} is at {url}")
    if out is None or repo is not None or public:
        raise click.UsageError(f"--to {target} takes --out DIR, and neither --repo nor --public")
    records = opened.export(target, out)
    if as_json:
        return print_json({**counts_of(opened), "out": str(out), "records": records})
    console.print(f"{records:,} records in {out}")


@command(
    "inspect",
    "rolltap inspect runs/first",
    "rolltap inspect runs/first record-1a2b",
    "rolltap inspect runs/first record-1a2b 3",
    "rolltap inspect runs/first --task count --sort reward",
)
@click.argument("run", type=RUN)
@click.argument("session", required=False)
@click.argument("call", required=False)
@click.option("--task", metavar="ID", help="Only the sessions of this task.")
@click.option("--group", metavar="ID", help="Only the sessions of this group.")
@click.option(
    "--sort",
    type=click.Choice(get_args(Sort)),
    help="Order of the sessions. By default it is that of their starts.",
)
@click.option(
    "--follow",
    is_flag=True,
    help="Print a line for each session that has ended or ends, until interrupted.",
)
@click.option(
    "--full",
    is_flag=True,
    help="All messages and prompt tokens of a CALL, not only its new ones.",
)
@json_option
def inspect_command(
    run: Path,
    session: str | None,
    call: str | None,
    task: str | None,
    group: str | None,
    sort: Sort | None,
    follow: bool,
    full: bool,
    as_json: bool,
) -> None:
    """Show a RUN, the calls of a SESSION, or a CALL with its tokens.

    Two sessions instead of a session and its call are compared: the first message and the first
    token that differ. Unique prefixes of ids are accepted, and the number of a CALL in its session,
    from 1; --follow takes whole ids.
    """
    if (session is not None and (task or group or sort or follow)) or (follow and sort):
        raise click.UsageError(
            "--task, --group, --follow and --sort are for a RUN alone, the last two not together",
        )
    if full and call is None:
        raise click.UsageError("--full is for a CALL")
    opened = rolltap.open_run(run)
    if follow:
        with suppress(KeyboardInterrupt):
            for ended in opened.follow(task=task, group=group):
                values = {name: getattr(ended, name) for name in _FOLLOWED}
                line = "  ".join(map(str, values.values()))
                if as_json:
                    line = json.dumps(values, default=str)
                click.echo(line)
    elif session is None:
        print_result(opened.summary(task=task, group=group, sort=sort or "started"), as_json)
    elif call is None:
        print_result(opened.inspect_session(session), as_json)
    else:
        try:
            print_result(opened.inspect_call(session, call, full=full), as_json)
        except InputError as error:
            with suppress(InputError):
                return print_result(opened.compare_sessions(session, call), as_json)
            raise error


_FOLLOWED = ("finished_at", "session_id", "task_id", "group_id", "status", "reward")


def _roles(value: str | tuple[CallRole, ...]) -> tuple[CallRole, ...]:
    """Return roles that are separated by commas as a tuple, each once, in their usual order."""
    if isinstance(value, tuple):
        return value
    asked = {role.strip() for role in value.split(",")}
    known = get_args(CallRole)
    if unknown := asked - set(known):
        raise click.BadParameter(
            f"{', '.join(map(repr, sorted(unknown)))}: choose among {', '.join(known)}",
        )
    return tuple(role for role in known if role in asked)


@command(
    "traces",
    "rolltap traces runs/first --out first-traces",
    "rolltap traces runs/first --json --roles agent,subagent > traces.jsonl",
)
@click.argument("run", type=RUN)
@click.option(
    "--strategy",
    type=click.Choice(get_args(Strategy)),
    default="prefix_merging",
    show_default=True,
    help="per_request: one trace for each trained call. prefix_merging: one for each path of the "
    "call tree. tree: the same, with the prefix that each shares with an earlier one.",
)
@click.option(
    "--roles",
    type=_roles,
    default=TRAINED_ROLES,
    metavar="ROLE,...",
    help=f"Roles to train: {', '.join(get_args(CallRole))}; by default {', '.join(TRAINED_ROLES)}.",
)
@click.option("--max-tokens", type=click.IntRange(1), help="Cut off the end of longer traces.")
@click.option(
    "--out",
    type=OUT,
    help="Write a dataset into this folder, which must be new or empty.",
)
@click.option("--json", "as_json", is_flag=True, help="Print each trace as a line of JSON.")
@click.option(
    "--ledger",
    "ledger_file",
    type=click.File("w", lazy=True),
    help="File to write the ledger into, as JSON.",
)
def traces_command(
    run: Path,
    strategy: Strategy,
    roles: tuple[CallRole, ...],
    max_tokens: int | None,
    out: Path | None,
    as_json: bool,
    ledger_file: TextIO | None,
) -> None:
    """Build the traces of a RUN, to train on.

    `datasets.load_from_disk` opens what --out names. Traces of sessions without a reward are there
    too, with the reward null: leave them out of a training, as the ledger does.
    """
    if out is None and not as_json and ledger_file is None:
        raise click.UsageError(
            "say where the traces go: --out DIR, --json, or --ledger FILE for their ledger alone",
        )
    traces = rolltap.open_run(run).traces(strategy, roles=roles, max_tokens=max_tokens)
    each = None
    if as_json:
        each = _print_trace
    if out is None:
        where = ""
        totals = traces.totals(each)
    else:
        where = f" in {out}"
        totals = traces.save(out, each)
    if ledger_file is not None:
        ledger_file.write(json.dumps(asdict(totals.ledger), indent=2) + "\n")
    console = plain_console()
    console.print(
        f"{counted(totals.traces, 'trace')} of {counted(totals.sessions, 'session')}{where}",
    )
    console.print(totals.ledger)


def _print_trace(trace: rolltap.Trace) -> None:
    print_json(trace.to_json())


@command("score", "rolltap score runs/first --engine http://127.0.0.1:8001 --as teacher")
@click.argument("run", type=RUN)
@engine_option(
    help="URL of the vLLM server of the other model, or several with commas, which share the work.",
)
@click.option("--as", "name", required=True, metavar="NAME", help="Name of the scores in the run.")
@click.option(
    "--adapter",
    metavar="NAME",
    help="An adapter that the engine serves; by default its base model.",
)
@click.option(
    "--top-k",
    default=0,
    type=click.IntRange(0),
    help="Number of the likeliest tokens that are stored too.",
)
@click.option(
    "--concurrency",
    default=8,
    show_default=True,
    type=click.IntRange(1),
    help="Number of requests at the same time.",
)
@json_option
def score_command(
    run: Path,
    engine: str,
    name: str,
    as_json: bool,
    **how: Any,
) -> None:
    """Store the log-probabilities of another model in a RUN.

    They are those of every sampled token. They are for `teacher` of a recipe, or for a trainer of
    your own. The engine's tokenizer must be that of the run. Calls that have scores are skipped, so
    a command that was stopped goes on where it was.

    Exit status 3: calls are left without scores, because they are too long for the engine or
    damaged.
    """
    report = rolltap.open_run(run).score(engine, name, **how)
    print_result(report, as_json)
    exit_unless(not report.skipped, status=3)


MOST_FINDINGS = 100
"""Maximum number of findings that are printed. `--json` prints all."""


@command(
    "verify",
    "rolltap verify runs/first",
    "rolltap verify runs/first --repair",
)
@click.argument("run", type=RUN)
@click.option(
    "--repair",
    is_flag=True,
    help="Truncate uncommitted tails and remove temporary files.",
)
@json_option
def verify_command(run: Path, repair: bool, as_json: bool) -> None:
    """Check a RUN for damage.

    Checked are the table files, the digest of each row that can be read, and the token ids,
    prompts, values and times of calls and sessions. The calls of a session with an unreadable row
    are not rebuilt. A run that is being recorded can be verified.

    The first line is the verdict: ok, needs repair or damaged. Exit status 1: the run is damaged.
    Exit status 0: it is not.

    --repair truncates an uncommitted tail and removes temporary files. After a machine crash the
    tail may be a commit whose prefix was lost: copy the file first. Files that are being written
    are not changed.

    For a damaged run, `rolltap merge RUN --out NEW` saves the rows that can be read.
    """
    found = rolltap.verify_run(run, repair=repair)
    if as_json:
        print_json(found.to_json())
    else:
        _print_verification(found)
    exit_unless(found.sound)


def _print_verification(found: "Verification") -> None:
    verdict = f"{found.verdict}: {found.sessions} sessions; rows: {_count(found.rows.items())}"
    grades = Counter(finding.grade for finding in found.findings)
    if grades:
        verdict += f"; findings: {_count(grades.items())}"
    click.echo(verdict)
    for done in found.repaired:
        click.echo(f"repaired: {done}")
    for finding in found.findings[:MOST_FINDINGS]:
        line = f"{finding.grade}: {finding.where}: {finding.what}"
        if finding.advice:
            line += f"; {finding.advice}"
        click.echo(line)
    more = len(found.findings) - MOST_FINDINGS
    if more > 0:
        click.echo(f"and {more} more: see --json")


def _count(numbers: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{number} {name}" for name, number in numbers)
