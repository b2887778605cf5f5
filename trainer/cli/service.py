"""`rolltap service`: rollouts by HTTP."""

from pathlib import Path
from typing import Any

import click

from rolltap.rollouts import serve_rollouts
from rolltap.trainer.cli.options import (
    OUT,
    PORT,
    TASKS,
    command,
    engine_option,
    harness_option,
    model_option,
    rollout_options,
    set_option,
)
from rolltap.trainer.console import plain_console
from rolltap.types import RolloutConfig


@command(
    "service",
    "rolltap service runs/served --tasks tasks.jsonl --harness pi \\",
    "    --model Qwen/Qwen3-4B --port 8900",
)
@set_option
@click.argument("run", type=OUT)
@click.option(
    "--tasks",
    type=TASKS,
    required=True,
    help="Tasks, as for `rolltap rollout`.",
)
@harness_option(required=True)
@engine_option()
@model_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=PORT,
    default=8900,
    show_default=True,
    help="Port to listen on; 0 is a free one.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with the clients' token, made if missing. By default service.token in RUN.",
)
@click.option(
    "--queue",
    type=click.IntRange(1),
    default=4096,
    show_default=True,
    help="Maximum number of sessions that wait or run.",
)
@click.option(
    "--evaluation-share",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.25,
    show_default=True,
    help="Share of the slots that groups with `evaluation` have while others wait too.",
)
@click.option(
    "--allow-host",
    multiple=True,
    metavar="HOST[:PORT]",
    help="Host that a client's own task may name: as the host of an LLM judge, in 'allow' of the "
    "task or of its judge, or as the registry of an image (docker.io is one).",
)
@rollout_options
def service_command(
    run: Path,
    tasks: Path,
    preset: str,
    engine: str,
    model: str,
    settings: dict[str, list[str]],
    **given: Any,
) -> None:
    """Serve rollouts by HTTP.

    Clients (`rolltap.Client`) send groups of sessions of the TASKS, and of tasks of their own
    unless the runtime is `process`. The sessions are judged, and recorded in RUN. Whoever has the
    token runs code here. The same command goes on after a kill: RUN has the accepted groups. See
    /docs for the interface and /health for what is wrong.
    """
    own = ("host", "port", "token_file", "queue", "evaluation_share", "allow_host")
    how = {name: given.pop(name) for name in own}
    config = RolloutConfig.of({**given, "recorder": settings})
    how["say"] = plain_console().print
    serve_rollouts(
        tasks,
        harness=preset,
        engine=engine,
        model=model,
        out=run,
        config=config,
        **how,
    )
