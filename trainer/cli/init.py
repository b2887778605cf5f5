"""`rolltap init`: writes an example of an own agent, which runs as it is."""

import json
import os
import shlex
import shutil
from importlib import resources
from pathlib import Path

import click

from rolltap.errors import InputError
from rolltap.trainer.cli.options import FOLDER, command
from rolltap.trainer.cli.record import name_of
from rolltap.trainer.console import plain_console

_EXAMPLE = Path(str(resources.files("rolltap.harnesses"))) / "own-agent"
_AGENT = "python3 ./agent.py"
"""The program of the example."""
_MODEL = "../../../runs/quickstart/model"


@command(
    "init",
    "rolltap init my-agent",
    'rolltap init my-agent --program "python3 agent.py" --model models/Qwen3-4B',
    "rolltap init my-agent --yes",
)
@click.argument("folder", type=FOLDER)
@click.option(
    "--program",
    metavar="COMMAND",
    help="Command line of your agent. {instruction} stands for the task's.",
)
@click.option("--model", metavar="FOLDER", help="Folder of the model to train.")
@click.option(
    "--yes",
    is_flag=True,
    help="Ask nothing: without --program an agent of 40 lines is written, too.",
)
def init_command(
    folder: Path,
    program: str | None,
    model: str | None,
    yes: bool,
) -> None:
    """Write a preset, a task with its judge and a recipe into FOLDER.

    FOLDER must be new or empty. The files run as they are: replace the task and its judge by your
    own. Asks for what is not given. Relative paths are those of this folder.
    """
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty: choose a new folder")
    if program is None and not yes:
        question = "Command line of your agent (the default is an example, which is written too)"
        program = _ask(question, _AGENT, "--program")
    if model is None:
        model = "models/Qwen3-4B"
        if not yes:
            model = _ask("Folder of the model", model, "--model")
    preset = None
    if program is not None and program != _AGENT:
        preset = _preset(program, folder)
    runtime = "process"
    if shutil.which("bwrap"):
        runtime = "sandbox"

    shutil.copytree(
        _EXAMPLE,
        folder,
        ignore=shutil.ignore_patterns("__pycache__"),
        dirs_exist_ok=True,
    )
    recipe = (folder / "recipe.toml").read_text()
    recipe = recipe.replace(json.dumps(_MODEL), json.dumps(str(Path(model).resolve())))
    recipe = recipe.replace('"sandbox"', json.dumps(runtime))
    (folder / "recipe.toml").write_text(recipe)
    if preset is not None:
        (folder / "agent.py").unlink()
        (folder / "agent.toml").write_text(preset)

    out = Path("runs", folder.resolve().name)
    tasks = str(folder / "tasks.jsonl")
    harness = ["--harness", str(folder / "agent.toml")]
    console = plain_console()
    console.print(f"{folder} has a task and its judge, a preset and a recipe.")
    console.print("Run these in this order; the last two need the engine that `serve` starts:")
    for line in (
        ["doctor", *harness],
        ["tasks", "check", tasks, "--runtime", runtime],
        ["serve", model],
        ["rollout", tasks, *harness, "--runtime", runtime, "--model", model, "--out", str(out)],
        ["train", str(folder / "recipe.toml"), "--out", f"{out}-trained"],
    ):
        console.print(f"  rolltap {shlex.join(line)}", soft_wrap=True)
    if not Path(model).is_dir():
        get = shlex.join(["hf", "download", "Qwen/Qwen3-4B", "--local-dir", model])
        quickstart = "Without a GPU, recipes/quickstart/run.sh makes runs/quickstart/model."
        console.print(f"{model} is not there yet: {get} gets a model. {quickstart}", soft_wrap=True)


def _ask(question: str, default: str, option: str) -> str:
    """Return the answer of a person. Raises `InputError` at the end of the input."""
    try:
        return input(f"{question} [{default}]: ") or default
    except EOFError:
        click.echo()
        raise InputError(
            f"the input ended before an answer: give {option}, or --yes for the default",
        ) from None


def _preset(program: str, folder: Path) -> str:
    """Return a preset of a command line. Its files are named relative to the preset. Raises
    `InputError`."""
    try:
        words = shlex.split(program)
        name = name_of(words)
    except (ValueError, IndexError) as error:
        raise InputError(
            f"--program {program!r} is no command line: write it as for a shell",
        ) from error
    for index, word in enumerate(words):
        is_path = word.startswith(("./", "../"))
        if is_path and not os.path.exists(word):
            raise InputError(f"--program names {word}, which does not exist: correct the path")
        if is_path or os.path.isfile(word):
            relative = os.path.relpath(word, folder)
            if not relative.startswith("../"):
                relative = f"./{relative}"
            words[index] = relative
    if not any("{instruction}" in word for word in words):
        words.append("{instruction}")
    first = next(index for index, word in enumerate(words) if "{instruction}" in word)
    return f"""\
name = {json.dumps(name)}
program = {json.dumps(words[0])}
arguments = {json.dumps(words[1:first])}
headless = {json.dumps(words[first:])}

[env]
OPENAI_API_KEY = "placeholder"  # and what else your agent does not start without
"""
