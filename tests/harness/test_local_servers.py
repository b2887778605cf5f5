"""A server on loopback, which a task may start, is reached directly and not through the recorder."""

import pytest

from rolltap.trainer.doctor.scripted_engine import Say
from rolltap.trainer.tasks.task import Task
from tests.deep import cases
from tests.harness.play import installed, play, shell

pytestmark = pytest.mark.harness

TASK = Task(id="ask", instruction="Ask the local server.", evaluate=["grep", "-q", "pong", "answer.txt"])


@pytest.mark.parametrize("name", cases(["codex", "mini-swe-agent"]))
async def test_a_shell_of_a_session_reaches_a_local_server(
    name, local_server, scripted_engine, tokenizer_folder, tmp_path
):
    harness = installed(name)
    end = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

    def reply(request):
        prompt = scripted_engine.tokenizer.decode(request["token_ids"])
        if "<tool_response>" not in prompt:
            return Say(shell(harness, f"curl -sS {local_server} > answer.txt"))
        return Say(shell(harness, end) if name == "mini-swe-agent" else "It answered.")

    scripted_engine.otherwise = reply
    played = await play(harness, TASK, scripted_engine, tokenizer_folder, tmp_path)
    assert (played.session.status, played.session.reward) == ("completed", 1.0), played.log
    assert [call.kind for call in played.calls] == ["root", "bridged"]
    assert not [event for event in played.of("refused") if event["host"] in ("localhost", "127.0.0.1")]
