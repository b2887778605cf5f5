"""The stages with an engine: serve, record, check."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lines import Line, at_least, at_most, fact, skipped
from plans import CONTEXT, MODEL, QUICKSTART, SHARING, Setting, make_plan, write_tasks

import rolltap
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.engine.weights import FIXED_TEXT

CACHE_SHARE = 0.9
"""Smallest share of the planned cache that an engine may have."""
AT_ONCE = {True: 2, False: 32}
"""Form without a GPU -> calls at once where the engine's speed is measured."""
TOKENS = {True: 64, False: 512}
"""Form without a GPU -> tokens that each of them samples."""
CACHE = re.compile(r"Available KV cache memory: ([\d.]+) GiB")
"""The line of vLLM's log (0.32 and 0.33, v1/worker/gpu_worker.py)."""


def serve(setting: Setting) -> Iterator[Line]:
    """Start an engine on the first GPU, for all trainings that share it."""
    if setting.model == MODEL:
        subprocess.run([sys.executable, QUICKSTART / "make_model.py", MODEL], check=True)
    for name in SHARING:
        if setting.several or name != "engines":
            make_plan(setting, name)
    log = setting.folder / "vllm.log"
    started = time.monotonic()
    engine = start_engine(setting, log)
    setting.url = engine.url
    yield fact("serve: seconds to start", time.monotonic() - started)
    yield cache_line(setting, log.read_text(errors="replace"))
    yield speed(setting)


def start_engine(setting: Setting, log: Path) -> rolltap.EngineServer:
    """Start an engine, which serves until the setting's servers are stopped."""
    engine = rolltap.EngineServer(
        setting.model,
        vllm=setting.vllm,
        port=free_port(),
        max_model_len=CONTEXT,
        lora_rank=8,
        max_staleness=1,
        log=log,
        extra=engine_arguments(setting),
    )
    setting.servers.enter_context(engine)
    os.environ["ROLLTAP_ENGINE_KEY_FILE"] = str(engine.key_file)
    return engine


def shares(setting: Setting) -> list[dict[str, Any]]:
    """Return the plans of the engine, one for each training that shares its GPU and can start."""
    found = [setting.plans[name] for name in SHARING if name in setting.plans]
    return [plan["memory"]["engine"] for plan in found if plan["can_start"]]


def engine_arguments(setting: Setting) -> list[str]:
    """Return further arguments of vLLM: its type, calls and share of the GPU, by all plans."""
    extra = ["--seed", "0"]
    planned = shares(setting)
    if not setting.cpu and planned:
        utilization = min(share["utilization"] for share in planned)
        sequences = max(share["sequences"] for share in planned)
        extra += ["--dtype", "bfloat16", "--gpu-memory-utilization", f"{utilization:.2f}"]
        extra += ["--max-num-seqs", str(sequences)]
    return extra


def cache_line(setting: Setting, log: str) -> Line:
    """Return the line of vLLM's own number for its cache, from its log."""
    what = "serve: GiB of cache"
    if setting.cpu:
        return skipped(what, "on a CPU the engine is told the size of its cache")
    planned = shares(setting)
    found = CACHE.search(log)
    if found is None or not planned:
        return skipped(what, "vLLM's log does not say it, or no training has a plan")
    least = min(planned, key=lambda share: share["utilization"])
    cache = least["sizes"]["cache"] / 2**30
    return at_least(what, float(found[1]), CACHE_SHARE * cache, "by vLLM's log", planned=cache)


def speed(setting: Setting) -> Line:
    """Let the engine sample several texts at once, and return the line of its tokens a second."""
    engine = EngineAdmin(setting.url)
    model = engine.models().base
    prompt = engine.tokenize(FIXED_TEXT)
    calls = AT_ONCE[setting.cpu]
    tokens = TOKENS[setting.cpu]
    started = time.monotonic()
    with ThreadPoolExecutor(calls) as pool:
        sampled = list(pool.map(lambda _: engine.sample(model, prompt, tokens), range(calls)))
    number = sum(len(each.ids) for each in sampled)
    seconds = time.monotonic() - started
    return fact(
        "serve: tokens a second",
        number / seconds,
        f"{calls} calls at once, of {tokens} tokens each",
    )


def record(setting: Setting) -> Iterator[Line]:
    """Record sessions of mini-swe-agent."""
    run = rolltap.rollout(
        write_tasks(setting.folder, "record"),
        harness="mini-swe-agent",
        engine=setting.url,
        model=setting.model,
        out=setting.folder / "record",
        sessions=2,
        timeout=300,
    )
    sessions = run.sessions()
    faults = [session for session in sessions if session.status == "infrastructure"]
    calls = sum(len(recorded) for recorded in run.calls.values())
    note = f"{len(sessions)} sessions, {calls} calls"
    if faults:
        note = faults[0].error or ""
    yield at_most("record: sessions with a fault", len(faults), 0, note)
    yield at_least("record: calls", calls, len(sessions))


def check(setting: Setting) -> Iterator[Line]:
    """Compare decoding with prefill, and score the recorded calls again."""
    report = rolltap.open_run(setting.folder / "record").check(setting.url, progress=False)
    what = "check: decode against prefill, nats"
    yield at_most(what, report.rounding, setting.limit, "after a fixed text")
    for row in report.rows:
        note = f"{row.calls} calls, {row.tokens} tokens, largest {row.max_difference:.2g}"
        what = f"check: {row.kind} prompts, nats"
        yield at_most(what, row.mean_difference, report.threshold, note)


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port
