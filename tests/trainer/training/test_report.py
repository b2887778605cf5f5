"""Reports of a training: the file of metrics, the seconds of its phases, and the lines on the
console."""

import io
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from rolltap.addons.errors import RunError
from rolltap.trainer.training import report
from rolltap.trainer.training.report import (
    METRICS,
    Phases,
    Reports,
    append_metrics,
    cut_metrics,
    read_metrics,
    step_line,
    time_left,
)


class Line(torch.nn.Module):
    """A model with one weight."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x, labels=None):
        return {"loss": ((self.weight * x - 1) ** 2).mean()}


class Killed(Exception):
    """Stands for the death of a training process."""


class Kill(TrainerCallback):
    """Kills a training before the checkpoint of a step."""

    def __init__(self, step):
        self.step = step

    def on_log(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Killed


@pytest.fixture
def train(tmp_path):
    """A function that trains four steps and returns what was printed. It may be killed before a
    step's checkpoint."""

    def train(kill_at=None, resume=None):
        console = Console(file=io.StringIO(), width=200)
        folder = tmp_path / "checkpoints"
        args = TrainingArguments(
            output_dir=str(folder),
            max_steps=4,
            save_steps=1,
            logging_steps=1,
            use_cpu=True,
            disable_tqdm=True,
            report_to="none",
            dataloader_pin_memory=False,
        )
        rows = [{"x": torch.ones(1)}] * 8
        callbacks = [Reports(tmp_path, console), Kill(kill_at)]
        trainer = Trainer(model=Line(), args=args, train_dataset=rows, callbacks=callbacks)
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=resume and str(folder / f"checkpoint-{resume}"))
        return console.file.getvalue()

    return train


def steps_in(path):
    return [line["step"] for line in read_metrics(path)]


def test_every_step_has_one_line_in_the_file_and_one_on_the_console(train, tmp_path):
    printed = train().splitlines()
    assert steps_in(tmp_path / METRICS) == [1, 2, 3, 4]
    for line in read_metrics(tmp_path / METRICS):
        assert {"loss", "learning_rate", "epoch"} <= line.keys()
    assert [line.split("  ")[0] for line in printed] == [f"step {step}/4" for step in (1, 2, 3, 4)]
    assert {path.name for path in tmp_path.iterdir()} == {METRICS, "checkpoints"}


@pytest.mark.parametrize(("killed", "resume"), [(3, 2), (1, None)])
def test_a_training_that_resumes_or_starts_again_writes_no_step_twice(
    train, tmp_path, killed, resume
):
    with pytest.raises(Killed):
        train(killed)
    before = read_metrics(tmp_path / METRICS)
    assert steps_in(tmp_path / METRICS) == list(range(1, killed + 1))
    train(resume=resume)
    assert steps_in(tmp_path / METRICS) == [1, 2, 3, 4]
    kept = resume or 0
    assert read_metrics(tmp_path / METRICS)[:kept] == before[:kept]


class TestPhases:
    @pytest.fixture
    def clock(self, monkeypatch):
        clock = SimpleNamespace(now=100.0)
        monkeypatch.setattr(report.time, "monotonic", lambda: clock.now)
        return clock

    def test_the_seconds_of_the_phases_are_together_the_time_of_the_step(self, clock):
        phases = Phases()
        phases.log = (logged := []).append
        clock.now += 50
        phases.on_train_begin(None, None, None)

        @phases.of("publication")
        def publish():
            clock.now += 2
            with phases.of("evaluation"):
                clock.now += 4
            clock.now += 1

        for waited in (10, 20):
            publish()
            with phases.of("rollout"):
                clock.now += waited
            clock.now += 5
            phases.on_step_end(None, None, None)
            clock.now += 0.5
        first = {
            "seconds_publication": 3,
            "seconds_evaluation": 4,
            "seconds_rollout": 10,
            "seconds_training": 5,
        }
        assert logged == [first, first | {"seconds_rollout": 20, "seconds_training": 5.5}]

    def test_a_phase_ends_with_its_error(self, clock):
        phases = Phases()
        phases.log = (logged := []).append

        @phases.of("rollout")
        def fail():
            clock.now += 1
            raise Killed

        with pytest.raises(Killed):
            fail()
        clock.now += 2
        phases.on_step_end(None, None, None)
        assert logged == [{"seconds_rollout": 1, "seconds_training": 2}]


def test_other_processes_report_nothing(tmp_path):
    printed = io.StringIO()
    state = SimpleNamespace(is_world_process_zero=False, global_step=1, max_steps=2)
    reports = Reports(tmp_path, Console(file=printed))
    reports.on_train_begin(None, state, None)
    reports.on_log(None, state, None, logs={"loss": 1.0})
    assert (printed.getvalue(), list(tmp_path.iterdir())) == ("", [])


NUMBERS = {
    "reward": 0.5,
    "reward/task/only": 0.5,
    "eval/reward": 0.25,
    "sessions": 16,
    "sessions_infrastructure": 3,
    "sessions_failed": 0,
    "sessions_unjudged": 1.0,
    "suspicious": 2.0,
    "sessions_no_reward": 1.0,
    "groups_without_reward": 0,
    "groups_without_signal": 1,
    "loss": 0.01234,
    "difference/bridged": 0.0,
    "difference/rendered": 1e-3,
    "off_policy/bridged": 0.25,
    "ratio/mean": 1.0,
    "ratio/max": math.inf,
    "clip_ratio/low_mean": 0.0,
    "clip_ratio/region_mean": 0.0123,
    "masked/low": 0.0,
    "masked/high": 0.2,
    "kl": 0.25,
    "entropy": 0.5,
    "tokens_trained": 100,
    "left_out/aborted": 7,
    "left_out/no_reward": 0,
    "tokens_in_rows": 1000,
    "tokens_forwarded": 400,
    "tokens_per_second": 50.0,
    "peak_memory_gib": 1.5,
    "seconds_rollout": 12.34,
    "seconds_publication": 0.5,
    "seconds_training": 3.0,
    "learning_rate": 1e-6,
}
LINE = (
    "step 3/5  reward [bold]0.500[/]  eval 0.250  infrastructure failures 3  unjudged 1  suspicious"
    " 2  sessions without a reward 1  groups without signal 1  loss 0.01234  difference 1.0e-03"
    "  off policy 2.5e-01  ratio 1.000  clipped 1.2 %  masked 20.0 %  KL 0.25  entropy 0.500  100"
    " tokens trained  7 left out  40 % of rows forwarded  50 tokens/s  1.5 GiB  rollout 12.3 s"
    "  publication 0.5 s  training 3.0 s"
)


def test_the_line_of_a_step_has_the_numbers_that_one_looks_at_first():
    assert step_line(3, 5, NUMBERS) == LINE


@pytest.mark.parametrize(
    ("seconds", "taken", "left", "words"),
    [(60, 2, 3, "about 0:01:30 left"), (60, 0, 5, ""), (60, 5, 0, "")],
)
def test_the_time_left_follows_from_the_steps_taken_since_the_start(seconds, taken, left, words):
    assert time_left(seconds, taken, left) == words


@pytest.mark.parametrize(
    ("logs", "line"),
    [
        ({"off_policy/root": 0.25, "off_policy/bridged": 0.5}, "off policy 5.0e-01"),
        (
            {
                "reward": None,
                "sessions_infrastructure": 0.0,
                "tokens_in_rows": 0.0,
                "tokens_trained": 0.0,
            },
            "0 tokens trained",
        ),
    ],
)
def test_the_line_has_no_numbers_that_a_step_lacks(logs, line):
    assert step_line(1, 2, logs) == f"step 1/2  {line}"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_a_line_is_one_object_with_its_step_and_null_for_what_json_lacks(path):
    values = {"loss": math.nan, "ratio/max": math.inf, "kl": None}
    values |= {"entropy": np.float32(0.5), "lr": torch.tensor(2.0)}
    append_metrics(path, 3, values)
    append_metrics(path, 4, {"tokens": 7, "note": "late"})
    lines = path.read_text().splitlines()
    first, second = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    lacks = {"loss": None, "ratio/max": None, "kl": None}
    assert first == {"step": 3, **lacks, "entropy": 0.5, "lr": 2.0}
    assert second == {"step": 4, "tokens": 7, "note": "late"}
    assert read_metrics(path) == [first, second]


def test_a_run_without_metrics_has_no_lines(path):
    cut_metrics(path, 0)
    assert read_metrics(path) == []
    assert not path.exists()


@pytest.mark.parametrize("torn", [b'{"step": 4', b'{"step": 4, "note": "\xc3'])
@pytest.mark.parametrize(("step", "kept"), [(0, []), (2, [1, 2]), (9, [1, 2, 3])])
def test_lines_after_the_checkpoint_and_half_a_line_are_cut(path, step, kept, torn):
    for taken in (1, 2, 3):
        append_metrics(path, taken, {"reward": taken / 3})
    with path.open("ab") as file:
        file.write(torn)
    assert steps_in(path) == [1, 2, 3]
    cut_metrics(path, step)
    append_metrics(path, step + 1, {})
    assert steps_in(path) == [*kept, step + 1]


@pytest.mark.parametrize(
    "line", ["step 2", '{"loss": 1}', '[{"step": 1}]', '{"step": "2"}', "null"]
)
def test_a_line_that_is_no_steps_is_named(path, line):
    append_metrics(path, 1, {})
    with path.open("a") as file:
        file.write(f"{line}\n")
    message = r"metrics\.jsonl, line 2 is not a step's metrics"
    with pytest.raises(RunError, match=message):
        read_metrics(path)
    with pytest.raises(RunError, match=message):
        cut_metrics(path, 1)
