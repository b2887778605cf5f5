"""Quickstart: makes the tiny model, serves it and trains it with recipe.toml. Called by run.sh."""

import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import NormalDist, mean

import click
from plot import plot_rewards
from rich.console import Console

import rolltap

HERE = Path(__file__).resolve().parent
RUNS = HERE.parents[1] / "runs" / "quickstart"
TASKS = HERE / "tasks.jsonl"
EVALUATED = 32
"""Sessions of the trained policy, after the training."""
console = Console(stderr=True)


@click.command()
@click.option("--vllm", default="vllm", show_default=True, help="The vllm program.")
@click.option(
    "--seed", default=0, show_default=True, help="Seed of the sampling and of the trainer."
)
def quickstart(vllm: str, seed: int) -> None:
    """Train the tiny model on its task. Resumes a run that was stopped; otherwise starts a new
    one."""
    model = RUNS / "model"
    if not model.exists():
        console.print("teaching the tiny model, which takes some minutes of CPU once")
    subprocess.run([sys.executable, HERE / "make_model.py", model], check=True)
    run = next_run(seed)
    log = RUNS / "vllm.log"
    engine = rolltap.EngineServer(
        str(model),
        vllm=vllm,
        port=free_port(),
        max_model_len=8192,
        log=log,
        extra=("--seed", str(seed)),
    )
    with ExitStack() as stack:
        console.print(f"starting vLLM; its log is {log}", soft_wrap=True)
        stack.enter_context(engine)
        os.environ["ROLLTAP_ENGINE_KEY_FILE"] = str(engine.key_file)
        console.print(
            f"vLLM serves the tiny model at {engine.url}; recording into {run}", soft_wrap=True
        )
        trained = rolltap.train(HERE / "recipe.toml", engine=engine.url, out=run, seed=seed)
        Console(soft_wrap=True).print(trained.summary(), markup=False, highlight=False)
        plot = run / "reward.png"
        console.print(f"plot: {plot}   trained model: {run / 'model'}", soft_wrap=True)
        sessions = trained.sessions()
        tokens = sum(step["tokens_trained"] for step in rolltap.read_training(run).metrics)
        after = rolltap.rollout(
            TASKS,
            harness="mini-swe-agent",
            engine=engine.url,
            model=model,
            out=run,
            sessions=EVALUATED,
            concurrency=8,
        )
    plot_rewards(after.sessions(), plot, f"quickstart, seed {seed}")
    first = min(sessions, key=lambda session: session.started_at).policy_version
    base = [session for session in sessions if session.policy_version == first]
    last = [session for session in after.sessions() if session.session_id in after.new_session_ids]
    console.print(
        f"The model learned to count lines from rewards alone: it succeeds in {interval(last)}, and"
        f" before in {interval(base)}. It was trained on {tokens:,.0f} of the tokens that it"
        f" sampled in {len(sessions)} sessions.",
        style="bold green",
        soft_wrap=True,
        highlight=False,
    )
    look = shlex.join(["rolltap", "view", str(run)])
    console.print(
        f'next: export PATH="{Path(sys.executable).parent}:$PATH"; {look}',
        soft_wrap=True,
        highlight=False,
    )


def interval(sessions: Sequence[rolltap.Session]) -> str:
    """Return the mean reward of sessions, each 0 or 1, with Wilson's 95 % interval."""
    n, share, z = (
        len(sessions),
        mean(session.reward or 0.0 for session in sessions),
        NormalDist().inv_cdf(0.975),
    )
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * (share * (1 - share) / n + z * z / (4 * n * n)) ** 0.5
    return f"{share:.0%} of {n} sessions (95 % interval {middle - half:.0%} to {middle + half:.0%})"


def next_run(seed: int) -> Path:
    """Return the folder of the first run of this seed that is not finished. It may not exist
    yet."""
    number = 1
    while (RUNS / f"seed-{seed}-run-{number}" / "model").exists():
        number += 1
    return RUNS / f"seed-{seed}-run-{number}"


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)  # as Ctrl-C: vLLM is stopped
    try:
        quickstart()
    except (rolltap.RolltapError, OSError) as error:
        sys.exit(f"error: {error}")
