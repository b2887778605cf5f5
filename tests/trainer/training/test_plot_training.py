import math

import pytest
from matplotlib.figure import Figure

from rolltap.trainer.training.report import MOST_LABELLED, append_metrics, plot_training

STEP = {
    "reward": 0.5,
    "reward/harness/codex": 0.25,
    "reward/harness/my%20own": 0.75,
    "reward/task/only": 0.5,
    "sessions": 16,
    "sessions_infrastructure": 3,
    "sessions_failed": 0,
    "sessions_no_reward": 0,
    "groups": 4,
    "groups_without_signal": 1,
    "groups_without_reward": 0,
    "off_policy/bridged": 0.25,
    "difference/bridged": 0.0,
    "difference/rendered": 1e-3,
    "ratio/mean": 1.0,
    "ratio/min": 0.9,
    "ratio/max": math.inf,
    "clip_ratio/low_mean": 0.0,
    "clip_ratio/high_mean": 0.1,
    "masked/low": 0.0,
    "masked/high": 0.2,
    "entropy": 0.5,
    "tokens_trained": 100,
    "tokens_computed": 90,
    "left_out/aborted": 7,
    "left_out/no_reward": 0,
    "tokens_in_rows": 1000,
    "tokens_forwarded": 400,
    "tokens_per_second": 50.0,
    "peak_memory_gib": 1.5,
}


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """A function that draws metrics of steps and returns the lines of each panel: title -> label -> points."""

    def draw(*steps):
        for number, metrics in enumerate(steps, 1):
            append_metrics(tmp_path / "metrics.jsonl", number, metrics)
        figures, save = [], Figure.savefig

        def savefig(figure, *args, **options):
            figures.append(figure)
            save(figure, *args, **options)

        monkeypatch.setattr(Figure, "savefig", savefig)
        plot_training(tmp_path / "metrics.jsonl", tmp_path / "training.png", "title")
        assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
        return {
            axes.get_title(): {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.get_lines()}
            for axes in figures[0].get_axes()
        }

    return draw


def test_every_metric_has_its_panel(drawn):
    panels = drawn(STEP, STEP | {"reward": 0.75})
    assert panels["reward"]["reward"] == [(1, 0.5), (2, 0.75)]
    assert panels["reward"].keys() == {"reward", "reward/harness/codex", "reward/harness/my own"}
    differences = panels["sampler and trainer: mean difference of log-probabilities"]
    assert differences == {"difference/bridged": [(1, 0), (2, 0)], "difference/rendered": [(1, 1e-3), (2, 1e-3)]}
    assert panels["sampled tokens"].keys() == {"tokens_trained", "tokens_computed", "left_out/aborted"}
    assert panels["tokens forwarded / tokens in rows"] == {"forwarded_share": [(1, 0.4), (2, 0.4)]}
    assert panels["share of tokens"].keys() == {
        "clip_ratio/low_mean",
        "clip_ratio/high_mean",
        "masked/low",
        "masked/high",
    }
    assert panels["sessions"].keys() == {"sessions", "sessions_infrastructure"}  # others never occurred
    assert panels["groups of sessions"].keys() == {"groups", "groups_without_signal", "groups_without_reward"}
    assert panels["off policy: mean difference of log-probabilities"].keys() == {"off_policy/bridged"}
    assert panels["importance ratio"].keys() == {"ratio/mean", "ratio/min"}
    assert all(panels.values())


def test_a_metric_that_a_step_lacks_has_no_point_there(drawn):
    assert drawn(STEP, {"tokens_trained": 0}, STEP)["entropy, KL"] == {"entropy": [(1, 0.5), (3, 0.5)]}


def test_many_tasks_are_lines_without_a_label(drawn):
    tasks = {f"reward/task/{i}": i / 10 for i in range(1, MOST_LABELLED + 2)}
    panel = drawn(STEP | tasks)["reward"]
    assert len(panel) == 3 + 10
    assert sum(not label.startswith("_") for label in panel) == 3


def test_a_training_without_metrics_yet_has_an_empty_picture(drawn):
    assert not any(drawn().values())
