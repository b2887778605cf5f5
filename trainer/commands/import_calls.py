"""`rolltap import`: writes calls that another program made as a run."""

from pathlib import Path
from typing import BinaryIO

import click
from rich.console import Console

import rolltap
from rolltap.trainer.commands.options import FOLDER, examples, json_option, print_result

MOST_FAULTS = 20
"""Most bad lines that are printed. The rest is counted."""


@click.command(
    "import",
    epilog=examples(
        "rolltap import calls.jsonl runs/imported",
        "zcat calls.jsonl.gz | rolltap import - runs/imported --skip-bad",
    ),
)
@click.argument("file", type=click.File("rb"))
@click.argument("run", type=FOLDER)
@click.option("--model", help="Folder or name of the model whose tokens they are: its tokenizer is noted in the run.")
@click.option("--skip-bad", is_flag=True, help="Leave bad lines out and import the others.")
@json_option
def import_command(file: BinaryIO, run: Path, model: str | None, skip_bad: bool, as_json: bool) -> None:
    """Write calls that another program made to a new RUN.

    FILE is JSON Lines, `-` the standard input. `rolltap merge` adds the new run to another one. With --model, only to
    one with the same tokenizer and chat template.

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

    Bad lines are printed with their number, and nothing is imported. Of two lines that contradict each other the later
    one is bad. A call whose tokens and log-probabilities do not match is not a bad line: it is kept, marked and not
    trained on. The run appears when it is complete: an import that is killed leaves none.
    """
    console = Console(stderr=True)
    faults = 0

    def report(number: int, fault: str) -> None:
        nonlocal faults
        faults += 1
        if faults <= MOST_FAULTS:
            console.print(f"line {number}: {fault}", markup=False, highlight=False, soft_wrap=True)

    try:
        summary = rolltap.import_calls(file, run, model=model, skip_bad=skip_bad, report=report)
    finally:
        if faults > MOST_FAULTS:
            console.print(f"and {faults - MOST_FAULTS} more bad lines", highlight=False)
    print_result(summary, as_json)
