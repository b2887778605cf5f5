"""`rolltap doctor`: tries a program without vLLM, or examines a model, and says what to set."""

import click

import rolltap
from rolltap.rollouts import examine, examine_model
from rolltap.trainer.cli.options import (
    command,
    exit_unless,
    harness_option,
    json_option,
    next_line,
    print_result,
    set_option,
)


@command(
    "doctor",
    "rolltap doctor --harness pi",
    "rolltap doctor -- python agent.py",
    "rolltap doctor --model mine",
    context_settings={"allow_interspersed_args": False},
)
@harness_option()
@click.option(
    "--model",
    metavar="FOLDER",
    help="Examine a model instead of a program: a folder, or a name on the Hub.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="The program is stopped after this time.",
)
@click.option(
    "--tool",
    metavar="NAME",
    help="The tool to call, instead of one whose name says that it does no harm.",
)
@set_option
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def doctor_command(
    preset: str | None,
    model: str | None,
    timeout: float,
    tool: str | None,
    settings: dict[str, list[str]],
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """Try a program without an engine, or examine a model, and say what to set.

    It needs no GPU and no network.

    The replies call a harmless tool of the program twice, and then end. COMMAND runs in this folder
    and keeps its own configuration and keys: one that goes past the proxy calls its own provider,
    so give it a placeholder for its key. It must work on an instruction of its own and exit. With
    --harness, the preset's program works on an instruction in an empty folder, with a home of its
    own.

    It says which APIs the program called, which calls were continued token for token, their roles,
    and what was refused. Exit status 0 (ready): all calls were captured and continued, and a tool's
    result came back. Exit status 3: all calls were captured, but no call has a history to continue,
    as with a program without tools, or no tool's result came back. Exit status 1: anything else.

    With --model, it says how prompts are written and continued, how tool calls and reasoning are
    read, and which tokens end a turn. Exit status 0: tool calls can be read and conversations
    continued. Exit status 1: they cannot.
    """
    if [any(command[:1]), preset is not None, model is not None].count(True) != 1:
        raise click.UsageError("give a COMMAND after --, or --harness, or --model")
    if model is not None:
        found = examine_model(model, settings)
        print_result(found, as_json)
        exit_unless(not found.problems)
        return
    click.echo(f"running {preset or command[0]}, at most {timeout:g} s", err=True)
    diagnosis = examine(
        command,
        harness=preset,
        timeout=timeout,
        options=settings,
        tool=tool,
    )
    print_result(diagnosis, as_json)
    if not diagnosis.problems and not as_json:
        given = ["--model", "MODEL", "--out", "runs/first"]
        for name, values in settings.items():
            given += [f"--set={name}={value}" for value in values]
        words = list(command)
        if preset is not None:
            harness = rolltap.Harness.load(preset)
            words = harness.command_for("INSTRUCTION")[1 + len(harness.arguments) :]
            given += ["--harness", preset]
        click.echo(next_line("record", *given, "--", *words), err=True)
    exit_unless(not diagnosis.problems)
    exit_unless(diagnosis.ready, status=3)
