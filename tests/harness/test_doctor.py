"""`rolltap doctor` with real programs: two presets, and a script that uses an SDK."""

import subprocess
import sys
from pathlib import Path

import pytest

from rolltap.trainer.boxes.environment import clean_environment
from rolltap.trainer.doctor.examine import examine
from tests.deep import cases
from tests.harness.play import installed

pytestmark = pytest.mark.harness


@pytest.mark.parametrize("name", cases(["claude-code", "mini-swe-agent"]))
def test_a_preset_is_ready(name):
    installed(name)
    diagnosis = examine(harness=name)
    assert diagnosis.problems == 0, diagnosis.findings
    assert [call.kind for call in diagnosis.seen.calls] == ["root", "bridged", "bridged"]
    assert {call.role for call in diagnosis.seen.calls} == {"agent"}
    assert diagnosis.seen.exit_status == 0


SCRIPT = """
import openai
client = openai.OpenAI()
parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
messages = [{"role": "user", "content": "What is the weather?"}]
while True:
    message = client.chat.completions.create(model="gpt-4.1", messages=messages, tools=tools).choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
        break
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "Rain."} for call in message.tool_calls]
"""


def test_a_script_with_an_sdk_is_ready(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = subprocess.run(
        [Path(sys.executable).with_name("rolltap"), "doctor", "--", sys.executable, "script.py"],
        cwd=tmp_path,
        env={**clean_environment(tmp_path), "OPENAI_API_KEY": "placeholder"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "ready. 3 calls captured, 2 continued token for token." in ended.stdout
    assert "weather" in ended.stdout
