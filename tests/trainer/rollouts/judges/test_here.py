"""The judge of `rolltap record --evaluate`."""

from pathlib import Path

import pytest

from rolltap.trainer.rollouts.judges.command import judge_here


@pytest.fixture
def judge(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda command: judge_here(command, tmp_path / "logs" / "s.evaluate.log")


@pytest.mark.parametrize(
    ("command", "reward", "parts"),
    [
        ("true", 1.0, {}),
        ("false", 0.0, {}),
        ("sh -c 'echo 5 passed; exit 1'", 0.0, {}),
        ("python3 -c 'assert 1 > 2'", 0.0, {}),
        ("sh -c 'echo many words; echo 0.25'", 0.25, {}),
        ("""echo '{"reward": 0.5, "parts": {"speed": 1}}'""", 0.5, {"speed": 1.0}),
    ],
)
def test_a_verdict_is_a_status_a_number_or_json(judge, command, reward, parts):
    judged = judge(command)
    assert (judged.reward, judged.parts, judged.unjudged) == (reward, parts, None)
    assert judged.evidence["log"] == "s.evaluate.log"


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("echo nan", "nan"),
        ("echo score: 0.3", "score: 0.3"),
        ("echo 0.3 0.4", "0.3 0.4"),
        ("sh -c 'exit 2'", "status 2"),
        ("python3 -m nosuch", "No module named nosuch"),
        ("python3 -c 'import nosuch'", "ModuleNotFoundError: No module named 'nosuch'"),
        ("python3 -c '1 / 0'", "ZeroDivisionError: division by zero"),
        ("sh -c 'kill -9 $$'", "status -9"),
        ("no-such-program", "No such file"),
        ("'", "is no command"),
        ("", "is no command"),
    ],
)
def test_all_else_is_no_verdict(judge, command, why):
    judged = judge(command)
    assert judged.reward is None
    assert why in judged.unjudged


def test_what_it_leaves_running_ends_with_it(judge, tmp_path):
    judged = judge("sh -c 'setsid sleep 1000 & echo $! > pid; echo 1'")
    assert judged.reward == 1.0
    pid = (tmp_path / "pid").read_text().strip()
    with pytest.raises(FileNotFoundError):
        Path(f"/proc/{pid}/stat").read_text()
