"""Reports of a training while it runs: the file of metrics, and a line a step on the console."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic_core import to_json
from rich.console import Console
from transformers import TrainerCallback

from rolltap.addons.store.staging import write_atomically
from rolltap.trainer.names import counted
from rolltap.trainer.runs.views.training import METRICS, read_metrics


def append_metrics(path: Path, step: int, metrics: Mapping[str, Any]) -> None:
    """Append the metrics of a step, in one write. Raises `OSError`."""
    with path.open("ab", buffering=0) as file:
        file.write(_line({"step": step, **metrics}))


def cut_metrics(path: Path, step: int) -> None:
    """Remove the lines after `step`, and a last line without its end. Raises as `read_metrics`, and `OSError`."""
    if path.exists():
        kept = b"".join(_line(line) for line in read_metrics(path) if line["step"] <= step)
        write_atomically(path, kept.decode())


def _line(values: Mapping[str, Any]) -> bytes:
    return to_json(values, inf_nan_mode="null", fallback=float) + b"\n"


PHASES = ("rollout", "publication", "evaluation", "training")
"""Phases of a step. A moment that is of no other one is of the last."""


class Phases(TrainerCallback):
    """Logs the seconds that each phase of a step took: `seconds_PHASE`. Phases do not overlap, and have no gaps."""

    def __init__(self) -> None:
        self.log: Callable[[Mapping[str, float]], None]
        """`ReplicatedTrainer.log_metrics`."""
        self._phase = PHASES[-1]
        self._since = time.monotonic()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Let the time until the end of the block, or of the decorated function, count for a phase."""
        outer = self._phase
        self._begin(phase)
        try:
            yield
        finally:
            self._begin(outer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the first step."""
        self._begin(self._phase)
        self._seconds.clear()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the seconds of the step, and begin the next one, with the time that a checkpoint takes."""
        self._begin(self._phase)
        self.log({f"seconds_{phase}": seconds for phase, seconds in self._seconds.items()})
        self._seconds.clear()

    def _begin(self, phase: str) -> None:
        now = time.monotonic()
        self._seconds[self._phase] += now - self._since
        self._phase = phase
        self._since = now


class Reports(TrainerCallback):
    """Reports a training into the folder `run` and on `console` whenever metrics are logged."""

    def __init__(self, run: Path, console: Console) -> None:
        self._run, self._console = run, console
        self._began = time.monotonic()
        self._first_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the lines after the checkpoint: their steps are taken again."""
        self._began = time.monotonic()
        self._first_step = state.global_step
        if state.is_world_process_zero:
            cut_metrics(self._run / METRICS, state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Mapping[str, Any], **kwargs: Any) -> None:
        """Report a step."""
        if not state.is_world_process_zero or "train_runtime" in logs:  # a summary comes after the last step
            return
        append_metrics(self._run / METRICS, state.global_step, logs)
        line = step_line(state.global_step, state.max_steps, logs)
        taken = state.global_step - self._first_step
        left = time_left(time.monotonic() - self._began, taken, state.max_steps - state.global_step)
        self._console.print(f"{line}  {left}".rstrip(), markup=True)

    def end(self, steps: int) -> None:
        """Say that the training has taken all its steps."""
        rewards = [line["reward"] for line in read_metrics(self._run / METRICS) if line.get("reward") is not None]
        took = timedelta(seconds=round(time.monotonic() - self._began))
        earned = ""
        if rewards:
            earned = f", reward {rewards[0]:.3f} at first and {rewards[-1]:.3f} at last"
        self._console.print(f"trained {counted(steps, 'step')} in {took}{earned}")


def time_left(seconds: float, taken: int, left: int) -> str:
    """Return in words how long the steps that are left take at the pace of those taken; empty if it is not known."""
    if taken < 1 or left < 1:
        return ""
    remaining = timedelta(seconds=round(seconds / taken * left))
    return f"about {remaining} left"


def step_line(step: int, steps: int, logs: Mapping[str, Any]) -> str:
    """Return the metrics of a step that a person looks at first, in rich's markup. Those that are missing are left out.

    The difference, or `off policy`, is the largest of the means by kind of continuity.
    """
    number = {name: value for name, value in logs.items() if isinstance(value, int | float)}

    def share(*names: str) -> float | None:
        values = [number[name] for name in names if name in number]
        return 100 * sum(values) if values else None

    def largest(prefix: str) -> float | None:
        return max((value for name, value in number.items() if name.startswith(prefix)), default=None)

    rows = number.get("tokens_in_rows")
    parts: list[tuple[str, float | None]] = [
        ("reward [bold]{:.3f}[/]", number.get("reward")),
        ("eval {:.3f}", number.get("eval/reward")),
        ("infrastructure failures {:.0f}", number.get("sessions_infrastructure") or None),
        ("unjudged {:.0f}", number.get("sessions_unjudged") or None),
        ("timeouts {:.0f}", number.get("sessions_timeout") or None),
        ("out of budget {:.0f}", number.get("sessions_budget") or None),
        ("suspicious {:.0f}", number.get("suspicious") or None),
        ("excluded {:.0f}", number.get("sessions_excluded") or None),
        ("sessions without a reward {:.0f}", number.get("sessions_no_reward") or None),
        ("groups without signal {:.0f}", number.get("groups_without_signal") or None),
        ("loss {:.4g}", number.get("loss")),
        ("difference {:.1e}", largest("difference/")),
        ("off policy {:.1e}", largest("off_policy/")),
        ("ratio {:.3f}", number.get("ratio/mean")),
        ("clipped {:.1f} %", share("clip_ratio/region_mean", "cispo_clip_ratio")),
        ("masked {:.1f} %", share("masked/low", "masked/high")),
        ("truncated {:.1f} %", share("truncated/low", "truncated/high")),
        ("KL {:.2g}", number.get("kl")),
        ("entropy {:.3f}", number.get("entropy")),
        ("{:,.0f} tokens trained", number.get("tokens_trained")),
        ("{:,.0f} left out", sum(value for name, value in number.items() if name.startswith("left_out/")) or None),
        ("{:.0f} % of rows forwarded", 100 * number["tokens_forwarded"] / rows if rows else None),
        ("{:,.0f} tokens/s", number.get("tokens_per_second")),
        ("{:.1f} GiB", number.get("peak_memory_gib")),
        *((f"{phase} {{:.1f}} s", number.get(f"seconds_{phase}")) for phase in PHASES),
    ]
    return "  ".join([f"step {step}/{steps}", *(text.format(value) for text, value in parts if value is not None)])
