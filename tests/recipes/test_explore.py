import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.records import Call, Session, VersionSpan
from rolltap.addons.store.tables import RunWriter
from tests.conftest import ROOT

EXPLORE = ROOT / "recipes" / "explore" / "explore.py"
START = datetime(2026, 1, 1, tzinfo=UTC)


def explore(*arguments):
    return subprocess.run(
        [sys.executable, "-W", "error", EXPLORE, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "60", "PYTHONIOENCODING": "utf-8"},
    )


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """Return the lines that it prints for a run of two writers, with runs of blanks replaced by one."""
    run = tmp_path_factory.mktemp("run")
    write_run(run)
    ended = explore(run)
    assert ended.stderr == ""
    return [" ".join(line.split()) for line in ended.stdout.splitlines()]


def write_run(run):
    write_metadata(run, {})

    def call(number, messages, reply, logprobs, **fields):
        return Call(
            session_id="s",
            call_id=f"c{number}",
            prompt_ids=[number],
            completion_ids=[7] * len(logprobs),
            logprobs=logprobs,
            weight_versions=[VersionSpan(version="1", start=0, end=len(logprobs))],
            messages=messages,
            reply=reply,
            started_at=START + timedelta(seconds=number),
            **fields,
        )

    asked = '[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "List the files."}]'
    tool_call = '{"function": {"name": "bash", "arguments": "{\\"command\\": \\"ls\\"}"}}'
    first = call(0, asked, f'{{"role": "assistant", "content": "", "tool_calls": [{tool_call}]}}', [-0.0005, -0.5])
    told = '[{"role": "tool", "content": "a.txt"}]'
    second = call(1, told, '{"role": "assistant", "content": "One: a.txt"}', [-0.7, -12.0], parent_id="c0")
    title = call(2, '[{"role": "user", "content": "A title?"}]', '{"role": "assistant"}', [-0.6], role="auxiliary")
    for calls in ([first], [second, title]):
        writer = RunWriter(run)
        for each in calls:
            writer.add_call(each)
        writer.close()
    writer = RunWriter(run)
    for reward in (0.0, 0.75):
        writer.add_session(
            Session(
                session_id="s", task_id="t", group_id="g", harness="h", status="completed", exit_status=0, reward=reward
            )
        )
    writer.close()


def test_it_counts_calls_and_the_last_reward_of_each_session(lines):
    assert lines[0] == "3 calls of 1 sessions"
    assert "role agent 2, auxiliary 1" in lines
    assert "reward 1 sessions, mean 0.750, best 0.750" in lines


def test_it_draws_the_histogram_of_all_sampled_tokens(lines):
    assert "5 sampled tokens by their log-probability" in lines
    assert "-1 to -0.3 ████████████ 3 (60.0%)" in lines
    assert "-inf to -8 ████ 1 (20.0%)" in lines
    assert "-0.001 to 0 ████ 1 (20.0%)" in lines
    assert "-4 to -2 0 (0.0%)" in lines


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
