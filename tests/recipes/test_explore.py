import json
import os
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.factories import add_rows, make_call, make_session, says, write_run

EXPLORE = ROOT / "recipes" / "explore" / "explore.py"


def explore(*arguments):
    command = [sys.executable, "-W", "error", EXPLORE, *arguments]
    environment = {**os.environ, "COLUMNS": "60", "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """Return the lines that it prints for a run of three writers, with runs of blanks replaced by
    one."""
    run = tmp_path_factory.mktemp("run")
    asked = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "List the files."},
    ]
    told = [{"role": "tool", "content": "a.txt"}]
    title = [{"role": "user", "content": "A title?"}]

    def call(number, messages, reply, logprobs, **fields):
        fields |= {"messages": json.dumps(messages), "reply": reply, "logprobs": logprobs}
        return make_call(number, [number], [7] * len(logprobs), **fields)

    write_run(run, call(0, asked, says("", "ls"), [-0.0005, -0.5]))
    second = call(1, told, says("One: a.txt"), [-0.7, -12.0], parent_id="0")
    add_rows(run, second, call(2, title, '{"role": "assistant"}', [-0.6], role="auxiliary"))
    add_rows(run, make_session(reward=0.0), make_session(reward=0.75))
    ended = explore(run)
    assert ended.stderr == ""
    return [" ".join(line.split()) for line in ended.stdout.splitlines()]


def test_it_counts_calls_and_last_rewards_and_draws_the_histogram_of_all_sampled_tokens(lines):
    assert lines[0] == "3 calls of 1 sessions"
    for line in (
        "role agent 2, auxiliary 1",
        "reward 1 sessions, mean 0.750, best 0.750",
        "5 sampled tokens by their log-probability",
        "-1 to -0.3 ████████████ 3 (60.0%)",
        "-inf to -8 ████ 1 (20.0%)",
        "-0.001 to 0 ████ 1 (20.0%)",
        "-4 to -2 0 (0.0%)",
    ):
        assert line in lines


def test_it_prints_the_main_line_from_its_first_message_to_its_last_reply(lines):
    conversation = lines[lines.index("the conversation of session s, 2 calls") + 1 :]
    assert conversation == [
        *("[system]", "Be brief.", "[user]", "List the files."),
        *("[assistant]", '-> bash {"command": "ls"}', "[tool]", "a.txt"),
        *("[assistant]", "One: a.txt"),
    ]


def test_it_imports_nothing_of_rolltap():
    assert not re.search(r"^\s*(import|from) rolltap", EXPLORE.read_text(), re.MULTILINE)


def test_a_folder_that_it_cannot_open_is_a_message(tmp_path):
    assert explore(tmp_path).stderr == f"{tmp_path} holds no calls\n"
