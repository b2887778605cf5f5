import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner
from datasets import load_from_disk

from rolltap.addons.errors import RunError
from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.cli.runs import traces_command
from rolltap.trainer.runs.views.report import summarize
from tests.trainer.outgoing import follow, json_lines, make_call, write_run

ROLLTAP = Path(sys.executable).with_name("rolltap")


@pytest.fixture
def run(tmp_path):
    write_run(tmp_path / "run")
    return tmp_path / "run"


def traces(*arguments):
    return CliRunner().invoke(traces_command, [*map(str, arguments)], catch_exceptions=False)


def test_json_prints_one_object_a_trace_and_nothing_else_on_stdout(run):
    ended = traces(run, "--json")
    main, *others = sorted(json_lines(ended.stdout), key=lambda trace: trace["prompt_ids"])
    assert (ended.exit_code, len(others)) == (0, 3)
    assert main["session_id"] == "s"
    assert main["call_ids"] == ["s-0", "s-1"]
    assert main["prompt_ids"] + main["completion_ids"] == [1, 2, 3, 4, 5, 6, 7]
    assert main["completion_mask"] == [1, 1, 0, 1, 1]
    assert main["logprobs"] == [-0.5, -1.5, 0.0, -0.5, -1.5]
    assert main["weight_versions"][0] == {"version": "1", "start": 0, "end": 2}
    assert [span["start"] for span in main["continuity"]] == [0, 3]
    assert (main["reward"], main["task_id"], main["harness"], main["role"]) == (0.25, "task", "pi", "agent")


def test_log_probabilities_are_printed_as_they_were_recorded(tmp_path):
    write_metadata(tmp_path, {})
    told = [-0.1, -1e-7, -12.34567, -0.3]
    call = make_call("s", 0, [1], [2, 3, 4, 5])
    call.logprobs = told
    with RunWriter(tmp_path) as writer:
        writer.add_call(call)
    [trace] = json_lines(traces(tmp_path, "--json").stdout)
    assert trace["logprobs"] == told


def test_traces_of_sessions_without_a_reward_are_there_with_null(run):
    rewards = {trace["session_id"]: trace["reward"] for trace in json_lines(traces(run, "--json").stdout)}
    assert rewards == {"s": 0.25, "t": None, "u": None}


def test_the_ledger_alone_is_a_file_of_json(run, tmp_path):
    ended = traces(run, "--ledger", tmp_path / "ledger.json")
    assert (ended.exit_code, ended.stdout) == (0, "")
    ledger = json.loads((tmp_path / "ledger.json").read_text())
    assert ledger == {"sampled": 14, "trained": 7, "left_out": {"aborted": 1, "auxiliary": 1, "no_reward": 5}}
    assert ledger == asdict(summarize(run).ledger)


def test_the_ledger_can_go_to_a_pipe(run, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    traces(run, "--ledger", tmp_path / "pipe")
    assert json.loads(os.read(reader, 4096))["sampled"] == 14
    os.close(reader)


def test_dataset_lines_and_ledger_of_one_command_agree(run, tmp_path):
    ended = traces(run, "--out", tmp_path / "out", "--json", "--ledger", tmp_path / "ledger.json")
    printed = json_lines(ended.stdout)
    assert list(load_from_disk(tmp_path / "out")) == printed
    trained = json.loads((tmp_path / "ledger.json").read_text())["trained"]
    assert trained == sum(sum(trace["completion_mask"]) for trace in printed if trace["reward"] is not None)


def test_the_summary_for_people_is_on_stderr(run, tmp_path):
    ended = traces(run, "--out", tmp_path / "out")
    assert f"4 traces of 3 sessions in {tmp_path / 'out'}" in ended.stderr
    assert "left out: auxiliary" in ended.stderr
    assert ended.stdout == ""


def test_the_strategy_decides_how_calls_become_traces(run):
    merged = json_lines(traces(run, "--json", "--strategy", "prefix_merging").stdout)
    single = json_lines(traces(run, "--json", "--strategy", "per_request").stdout)
    assert sorted(len(trace["call_ids"]) for trace in merged) == [1, 1, 1, 2]
    assert [len(trace["call_ids"]) for trace in single] == [1] * 5


def test_roles_select_calls_and_the_ledger_names_the_others(run, tmp_path):
    ended = traces(run, "--json", "--roles", "subagent", "--ledger", tmp_path / "ledger.json")
    assert [trace["prompt_ids"] for trace in json_lines(ended.stdout)] == [[20, 21]]
    ledger = json.loads((tmp_path / "ledger.json").read_text())
    assert ledger == {"sampled": 14, "trained": 3, "left_out": {"aborted": 1, "auxiliary": 1, "agent": 9}}


def test_side_questions_are_trained_when_they_are_asked_for(run):
    traced = json_lines(traces(run, "--json", "--roles", "agent, auxiliary").stdout)
    assert sorted(trace["role"] for trace in traced) == ["agent", "agent", "agent", "auxiliary"]


def test_long_traces_are_cut_at_their_end_and_the_ledger_says_how_much(run, tmp_path):
    ended = traces(run, "--json", "--max-tokens", 4, "--ledger", tmp_path / "ledger.json")
    tokens = sorted(trace["prompt_ids"] + trace["completion_ids"] for trace in json_lines(ended.stdout))
    assert tokens == [[1, 2, 3, 4], [20, 21, 22, 23], [40, 41, 42], [50, 51, 52, 53]]
    assert json.loads((tmp_path / "ledger.json").read_text())["left_out"]["over_length"] == 3


def test_the_strategy_tree_names_the_trace_that_begins_alike(run):
    writer, root = RunWriter(run), make_call("v", 0, [60, 61], [62])
    for call in (root, follow(root, 1, [63], [64]), follow(root, 2, [65], [66])):
        writer.add_call(call)
    writer.close()
    first, second = (
        t for t in json_lines(traces(run, "--json", "--strategy", "tree").stdout) if t["session_id"] == "v"
    )
    assert (first["shared_trace_id"], first["shared_tokens"]) == (None, 0)
    assert (second["shared_trace_id"], second["shared_tokens"]) == (first["trace_id"], 3)


def test_without_an_output_the_message_names_the_options(run):
    ended = traces(run)
    assert ended.exit_code == 2
    assert "say where the traces go: --out DIR, --json, or --ledger FILE" in ended.stderr


@pytest.mark.parametrize("roles", ["agent,boss", ""])
def test_an_unknown_role_is_named_with_the_valid_ones(run, roles):
    ended = traces(run, "--json", "--roles", roles)
    assert ended.exit_code == 2
    assert f"'{roles.removeprefix('agent,')}': choose among agent, subagent, compaction, auxiliary" in ended.stderr


def test_a_folder_that_is_not_empty_is_refused(run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(RunError, match="exists and is not an empty folder: choose a new one"):
        traces(run, "--out", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_a_folder_that_is_no_run_leaves_no_output(tmp_path):
    with pytest.raises(RunError, match="is not a run folder"):
        traces(tmp_path, "--out", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_ledger_that_cannot_be_written_is_an_error_of_the_user(run, tmp_path):
    ended = traces(run, "--ledger", tmp_path / "missing" / "ledger.json")
    assert ended.exit_code == 1
    assert "Could not open file" in ended.stderr


@pytest.fixture
def long_run(tmp_path):
    """Write a run of three sessions whose JSON takes one megabyte in all."""
    write_metadata(tmp_path / "run", {})
    writer = RunWriter(tmp_path / "run")
    for i in range(3):
        writer.add_call(make_call(f"s{i}", 0, [1] * 100_000, [2]))
    writer.close()
    return tmp_path / "run"


def test_a_full_disk_is_a_message_and_leaves_no_files(long_run, tmp_path):
    ended = subprocess.run(
        [ROLLTAP, "traces", long_run, "--out", tmp_path / "out"],
        capture_output=True,
        text=True,
        # limit on the size of a file
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )
    assert ended.returncode == 1
    assert "could not be written: " in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_killed_command_leaves_no_half_dataset(long_run, tmp_path, number):
    command = [ROLLTAP, "traces", long_run, "--out", tmp_path / "out", "--json"]
    # background jobs ignore Ctrl-C
    process = subprocess.Popen(
        command,
        bufsize=0,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with process, process.stdout:
        assert process.stdout.read(1) == b"{"  # the pipe is full, so the command blocks in the middle of its output
        assert list(tmp_path.glob(".out.*"))
        process.send_signal(number)
        process.wait(timeout=60)
    assert not (tmp_path / "out").exists()
    if number != signal.SIGKILL:
        assert process.returncode == 130
        assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_closed_pipe_ends_it_quietly(run, tmp_path):
    command = [ROLLTAP, "traces", run, "--json", "--out", tmp_path / "out"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    with process.stderr as stderr:
        assert "Traceback" not in stderr.read()
    process.wait(timeout=60)
    assert not (tmp_path / "out").exists()
