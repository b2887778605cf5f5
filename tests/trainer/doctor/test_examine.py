"""Real programs under a real recorder."""

import sys
from pathlib import Path

import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.doctor.examine import examine
from rolltap.trainer.doctor.scripted_model import FINAL
from rolltap.trainer.doctor.tool_choice import GREETING
from tests.deep import cases

AGENT = Path(__file__).with_name("agent.py")
LOOPBACK = "http://127.0.0.1:9/v1/chat/completions"


SECONDS = 600.0
"""Longest time of a program that ends by itself."""


def tried(*odd, timeout=SECONDS, **how):
    return examine([sys.executable, str(AGENT), *odd], timeout=timeout, **how)


def problems(diagnosis):
    return [finding.text for finding in diagnosis.findings if finding.level == "problem"]


def test_a_program_whose_calls_are_continued_is_ready_whatever_key_the_engines_of_the_user_have(
    monkeypatch,
):
    monkeypatch.setenv("ROLLTAP_ENGINE_KEY_FILE", "/missing.key")
    diagnosis = tried()
    seen = diagnosis.seen
    assert (diagnosis.findings, seen.exit_status, seen.output.strip()) == ([], 0, FINAL)
    assert [call.kind for call in seen.calls] == ["root", "bridged", "bridged"]
    results = []
    for call in seen.calls:
        assert call.role == "agent"
        assert call.dialect == "openai-chat"
        assert call.host == "api.openai.com"
        results += [each["content"] for each in call.parsed_messages if each["role"] == "tool"]
    assert results == [f"{GREETING}\n"] * 2


def test_an_unknown_api_a_schema_and_a_rewritten_history_are_each_told():
    diagnosis = tried("elsewhere", "schema", "rewrites")
    elsewhere, *rewritten = problems(diagnosis)
    assert "POST bedrock-runtime.us-east-1.amazonaws.com/model/m/converse" in elsewhere
    assert len(rewritten) == 2
    assert all("message 0 is not that of call" in text for text in rewritten)
    assert [call.kind for call in diagnosis.seen.calls] == ["root", "root", "rendered", "rendered"]
    assert diagnosis.seen.output.splitlines() == ['{"n": 1}', FINAL]


def test_a_program_that_ignores_the_proxy_is_told_so():
    diagnosis = tried("direct")
    assert diagnosis.seen.calls == []
    assert diagnosis.seen.exit_status == 1
    (problem,) = problems(diagnosis)
    cause = "No model call came. A model on loopback is asked past the recorder, and there is"
    assert f"{cause} '{LOOPBACK}' in {AGENT}" in problem


NO_CALL = "The program ended with status 1: "
ASKS = (
    "import httpx, os\nos.environ.update({})\n"
    "httpx.post('http://model.rolltap/v1/{}', json={{'model': 'm'}})"
)
PAST_PROXIES = {"NO_PROXY": "*", "no_proxy": "*"}
MISTAKES = [
    ("import sys; sys.exit('usage: agent TASK')", NO_CALL, "it lacks a key, an argument or a"),
    ("import os; os.environ['SOME_API_KEY']", NO_CALL, "A placeholder key is enough."),
    ("input('Your task? ')", NO_CALL, "below say that it lacks"),
    (ASKS.format(PAST_PROXIES, "responses"), NO_CALL, "it sets NO_PROXY"),
    (ASKS.format({}, "chat/completion"), "did you mean /v1/chat/completions?", "base URL"),
    (
        f"import os; os.environ['X_BASE_URL']='{LOOPBACK}'",
        f"'{LOOPBACK}' in the command line",
        "other host",
    ),
]


@pytest.mark.parametrize(("program", "said", "advice"), cases(MISTAKES, 3, 4))
def test_a_mistake_of_an_hour_with_the_doctor_is_said(program, said, advice):
    found = examine([sys.executable, "-c", program], timeout=SECONDS).findings
    levels = [each.level for each in found if said in each.text and advice in each.advice]
    assert levels == ["problem"], found


def test_a_program_that_is_not_on_the_path_is_said_before_anything_starts():
    with pytest.raises(
        InputError, match="'no-such-agent' is not on the PATH: install it, or give its folder"
    ):
        examine(["no-such-agent", "--task", "x"])


@pytest.mark.deep  # the choice and the finding have tests of their own
def test_a_tool_that_the_program_never_offered_is_refused_in_words():
    assert problems(tried(tool="get_price")) == [
        "The program never offered a tool get_price. It offers shell."
    ]
    assert tried(tool="shell").ready


def test_a_program_gets_a_reply_when_the_script_has_none_for_its_prompt(monkeypatch):
    monkeypatch.setattr("rolltap.trainer.doctor.examine.next_reply", lambda *_: 1 / 0)
    diagnosis = tried()
    assert [call.status for call in diagnosis.seen.calls] == ["completed"]
    assert diagnosis.seen.output.strip() == FINAL


@pytest.mark.deep  # run_supervised has its own tests, and the finding is in test_findings.py
def test_a_program_that_does_not_end_is_stopped():
    diagnosis = tried("hangs", timeout=1)
    assert (diagnosis.seen.stopped, diagnosis.seen.exit_status) == ("timeout", None)
    assert any("did not end within 1 s" in text for text in problems(diagnosis))


TOOL = f"""#!{sys.executable}
import os, sys
if '--version' in sys.argv:
    sys.exit(print('tool 2.0.1'))
home = os.listdir(os.environ['HOME'])
print(os.listdir('.'), home, 'SECRET_OF_MINE' in os.environ, os.environ['WINDOW'])
sys.argv = sys.argv[:1]
exec(open({str(AGENT)!r}).read())
"""
PRESET = """name = "tool"
version = "2.0.0"
install = "get tool"
headless = []
quirks = ["Is small."]
[env]
WINDOW = "{max_model_len}"
"""


def test_a_preset_starts_its_program_in_an_empty_folder_with_a_home_of_its_own(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("SECRET_OF_MINE", "x")
    program = tmp_path / "tool"
    program.write_text(TOOL)
    program.chmod(0o755)
    (tmp_path / "tool.toml").write_text(f'program = "{program}"\n{PRESET}')
    diagnosis = examine(harness=str(tmp_path / "tool.toml"), timeout=SECONDS)
    assert diagnosis.seen.output.splitlines()[0] == "[] [] False 1000000"
    assert diagnosis.problems == 0
    assert diagnosis.seen.quirks == ["Is small."]
    (note,) = diagnosis.findings
    assert note.level == "note"
    assert "2.0.1" in note.text
    assert "get tool" in note.advice


@pytest.mark.parametrize("how", [{}, {"command": ["true"], "harness": "pi"}])
def test_a_program_is_given_in_one_way(how):
    with pytest.raises(InputError, match="a command or a harness"):
        examine(**how)
