import json
import sys
from pathlib import Path

import pytest

from tests.trainer.cli.program import run_rolltap

AGENT = Path(__file__).parents[1] / "doctor" / "agent.py"


def test_doctor_tells_a_ready_program_by_its_status_and_as_json():
    ended = run_rolltap("doctor", "--json", "--", sys.executable, AGENT)
    told = json.loads(ended.stdout)
    assert (ended.returncode, told["ok"], told["findings"]) == (0, True, [])
    assert [call["kind"] for call in told["calls"]] == ["root", "bridged", "bridged"]
    assert ended.stderr.startswith(f"running {sys.executable}, at most 120 s")


def test_doctor_tells_a_program_that_makes_no_call_what_to_set():
    ended = run_rolltap("doctor", "--", sys.executable, "-c", "print('no key')")
    assert ended.returncode == 1
    assert "problem: No model call came." in ended.stdout
    assert "HTTPS_PROXY" in ended.stdout
    assert "no key" in ended.stdout


def test_doctor_does_not_call_a_program_ready_that_dies_at_its_tool_call():
    ended = run_rolltap("doctor", "--", sys.executable, AGENT, "raises")
    assert ended.returncode == 1
    assert "problem: The call of shell was not answered" in ended.stdout


def test_doctor_has_a_status_for_a_program_that_has_no_history_to_continue():
    ended = run_rolltap("doctor", "--", sys.executable, AGENT, "toolless")
    assert ended.returncode == 3
    assert ended.stdout.splitlines()[0] == f"{sys.executable}: 1 call captured; continuity not tried."


@pytest.mark.parametrize("arguments", [[], ["--harness", "pi", "--", "true"], ["--timeout", "0", "--", "true"]])
def test_a_wrong_command_line_is_status_2(arguments):
    assert run_rolltap("doctor", *arguments).returncode == 2


def test_a_program_that_is_not_there_is_a_message():
    ended = run_rolltap("doctor", "--", "no-such-program")
    assert ended.returncode == 1
    assert "'no-such-program' is not on the PATH" in ended.stderr
    assert "Traceback" not in ended.stderr
