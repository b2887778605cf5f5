import json
import sys
from pathlib import Path

import pytest

from tests.deep import cases
from tests.trainer.cli.program import ASK, ASK_WITH_TOOLS, run_rolltap

AGENT = Path(__file__).parents[1] / "doctor" / "agent.py"


def test_doctor_tells_a_ready_program_by_its_status_and_as_json():
    ended = run_rolltap("doctor", "--tool", "shell", "--json", "--", sys.executable, AGENT)
    assert ended.returncode == 0
    told = json.loads(ended.stdout)
    assert told["ok"] is True
    assert told["findings"] == []
    assert [call["kind"] for call in told["calls"]] == ["root", "bridged", "bridged"]
    assert ended.stderr.startswith(f"running {sys.executable}, at most 120 s")


@pytest.mark.parametrize(
    ("program", "status", "words"),
    cases(
        [
            ("print('no key')", 1, ["problem: No model call came.", "HTTPS_PROXY", "no key"]),
            (ASK_WITH_TOOLS, 1, ["problem: The call of look was not answered"]),
            (
                ASK.replace("sys.exit(3)", ""),
                3,
                [
                    "1 call captured; no call continued another, so continuity was not tried.\n",
                    "next: rolltap record --model MODEL --out runs/first -- ",
                ],
            ),
        ],
        *(0, 2),
    ),
)
def test_doctor_says_what_a_program_lacks(program, status, words):
    ended = run_rolltap("doctor", "--", sys.executable, "-c", program)
    assert ended.returncode == status
    for said in words:
        assert said in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_next_command_of_a_preset_starts_its_program_as_the_doctor_did(tmp_path):
    (tmp_path / "own.toml").write_text(
        f'name = "own"\nprogram = "{sys.executable}"\narguments = ["{AGENT}"]\n'
        'headless = ["toolless", "-p", "{instruction}"]\n'
    )
    given = ["--harness", "own.toml", "--set", "rolltap_allow=pypi.org"]
    ended = run_rolltap("doctor", *given, cwd=tmp_path)
    line = ended.stderr.splitlines()[-1]
    options = "--model MODEL --out runs/first --set=rolltap_allow=pypi.org --harness own.toml"
    assert line == f"next: rolltap record {options} -- toolless -p INSTRUCTION"


def test_doctor_tells_what_a_model_gives(tokenizer_folder):
    ended = run_rolltap("doctor", "--model", tokenizer_folder, "--json")
    assert ended.returncode == 0
    told = json.loads(ended.stdout)
    assert told["ok"] is True
    assert told["renderer"] == "qwen3"
    assert told["tool_parser"] == "hermes"
    assert told["stop_tokens"].keys() == {"<|im_end|>", "<|endoftext|>"}
    assert set(told["turns"].values()) == {True}
    named = run_rolltap(
        "doctor", "--model", tokenizer_folder, "--set", "rolltap_tool_parser=hermes"
    )
    assert "replies by  hermes" in named.stdout


def test_doctor_says_what_a_model_lacks_and_why(tmp_path, save_tokenizer):
    save_tokenizer(tmp_path, "{% for message in messages %}{{ message.content }}{% endfor %}")
    ended = run_rolltap("doctor", "--model", tmp_path)
    assert ended.returncode == 1
    words = " ".join(ended.stdout.split())
    assert f"{tmp_path}: not ready." in words
    assert "problem the tool calls of" in words
    assert "does not end an assistant's turn with a stop token" in words


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model", ".", "--", "true"],
        [],
        ["--harness", "pi", "--", "true"],
        ["--timeout", "0", "--", "true"],
    ],
)
def test_a_wrong_command_line_is_status_2(arguments):
    assert run_rolltap("doctor", *arguments).returncode == 2
