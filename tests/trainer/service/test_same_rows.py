"""Sessions of a service have the rows of sessions here, but for names and times."""

import json

import pytest

from tests.boxes import sandboxed
from tests.trainer.cli.program import run_rolltap
from tests.trainer.cli.test_same_rows import arguments, rows
from tests.trainer.service.served import serving

__all__ = ["arguments"]


@sandboxed
@pytest.mark.deep  # short, sessions behind ssh
def test_sessions_of_a_service_have_the_rows_of_sessions_here(
    arguments,
    scripted_engine,
    tokenizer_folder,
    tmp_path,
):
    here = run_rolltap(*arguments, "--out", tmp_path / "here", "--runtime", "sandbox")
    assert here.returncode == 0, here.stderr
    (task,) = (tmp_path / "tasks.jsonl").read_text().splitlines()
    harness = tmp_path / "harness.toml"
    run = tmp_path / "service" / "run"
    how = {"tasks": [json.loads(task)]}
    options = ("--runtime", "sandbox")
    with serving(run, scripted_engine.url, tokenizer_folder, harness, *options, **how) as service:
        assert service.submit(id="g", task="t", sessions=2).status_code == 201
        service.events_of("g")
        assert service.stop() == 130
    assert rows(run) == rows(tmp_path / "here")
