"""`rolltap serve`: starts the engine."""

import shlex
import sys

import click
from rich.console import Console

import rolltap
from rolltap.trainer.commands.options import engine_key_option, examples


@click.command(
    "serve",
    epilog=examples(
        "rolltap serve Qwen/Qwen3-4B --vllm ~/venvs/vllm/bin/vllm",
        "rolltap serve models/mine --lora-rank 16 -- --gpu-memory-utilization 0.5",
    ),
)
@click.argument("model")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, help="Port to listen on.")
@click.option("--vllm", default="vllm", show_default=True, help="The vllm program, in an environment of its own.")
@click.option("--max-model-len", type=click.IntRange(1), help="Context window in tokens; the model's own if not given.")
@click.option("--lora-rank", type=click.IntRange(0), default=0, help="Accept LoRA adapters up to this rank.")
@engine_key_option("File with the key that the engine requires; made if it does not exist. By default a new file.")
@click.argument("extra", nargs=-1, type=click.UNPROCESSED)
def serve_command(
    model: str, host: str, port: int, vllm: str, max_model_len: int | None, lora_rank: int, extra: tuple[str, ...]
) -> None:
    """Start vLLM for recording and publishing.

    It serves MODEL with the endpoints and flags that these need, on the GPUs, or on the CPU if vLLM is a CPU build.
    Every route but /health requires a key. Arguments after `--` are passed on to `vllm serve`. A start-up that takes
    more than two hours is stopped.
    """
    server = rolltap.EngineServer(
        model, vllm=vllm, host=host, port=port, max_model_len=max_model_len, lora_rank=lora_rank, extra=extra
    )
    with server:
        console = Console(stderr=True, soft_wrap=True, highlight=False)
        console.print(f"vLLM serves {model} at {server.url}", style="bold", markup=False)
        console.print(f"export ROLLTAP_ENGINE_KEY_FILE={shlex.quote(str(server.key_file))}", markup=False)
        sys.exit(server.wait())
