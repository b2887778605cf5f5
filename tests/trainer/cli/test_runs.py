"""`rolltap traces`, `export` and `inspect`."""

import json
import os
import resource
import signal
import subprocess
from functools import partial

import pytest
from click.testing import CliRunner
from datasets import load_from_disk

from rolltap.addons.errors import RunError
from rolltap.trainer.cli.runs import export_command, traces_command
from tests import factories
from tests.trainer.cli.program import ROLLTAP, run_rolltap
from tests.trainer.outgoing import json_lines, make_call, write_run
from tests.trainer.traces.changed import change_rows


@pytest.fixture
def run(tmp_path):
    write_run(tmp_path / "run")
    return tmp_path / "run"


def traces(*arguments):
    return CliRunner().invoke(traces_command, [*map(str, arguments)], catch_exceptions=False)


def export(*arguments):
    return CliRunner().invoke(export_command, [*map(str, arguments)], catch_exceptions=False)


def test_lines_dataset_summary_and_ledger_of_one_command_agree(run, tmp_path):
    out = tmp_path / "out"
    ledger_file = tmp_path / "ledger.json"
    ended = traces(run, "--json", "--ledger", ledger_file, "--out", out)
    assert ended.exit_code == 0
    assert f"4 traces of 3 sessions in {out}" in ended.stderr
    assert "left out: auxiliary" in ended.stderr
    lines = json_lines(ended.stdout)
    assert list(load_from_disk(out)) == lines
    ledger = json.loads(ledger_file.read_text())
    assert ledger["sampled"] == 14
    assert ledger["left_out"] == {"aborted": 1, "auxiliary": 1, "no_reward": 5}
    trained = 0
    for trace in lines:
        # those of sessions without a reward are there, too
        assert trace["reward"] == {"s": 0.25, "t": None, "u": None}[trace["session_id"]]
        if trace["reward"] is not None:
            trained += sum(trace["completion_mask"])
    assert ledger["trained"] == trained == 7


def test_log_probabilities_are_printed_as_they_were_recorded(tmp_path):
    told = [-0.1, -1e-7, -12.34567, -0.3]
    factories.write_run(tmp_path, make_call("s", 0, [1], [2, 3, 4, 5], logprobs=told))
    [trace] = json_lines(traces(tmp_path, "--json").stdout)
    assert trace["logprobs"] == told


@pytest.mark.parametrize(
    ("options", "traced", "left_out"),
    [
        ("--strategy per_request", [4, 7, 5, 3, 4], {"auxiliary": 1, "no_reward": 5}),
        ("--roles agent,auxiliary", [7, 2, 3, 4], {"subagent": 3, "no_reward": 5}),
        ("--max-tokens 4", [4, 4, 3, 4], {"auxiliary": 1, "no_reward": 5, "over_length": 3}),
    ],
)
def test_an_option_decides_which_calls_become_traces_and_the_ledger_has_the_rest(
    run, tmp_path, options, traced, left_out
):
    ledger_file = tmp_path / "ledger.json"
    ended = traces(run, "--json", "--ledger", ledger_file, *options.split())
    tokens = [trace["prompt_ids"] + trace["completion_ids"] for trace in json_lines(ended.stdout)]
    assert [len(ids) for ids in sorted(tokens)] == traced
    assert json.loads(ledger_file.read_text())["left_out"] == {"aborted": 1, **left_out}


def test_the_ledger_alone_can_go_to_a_pipe(run, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert traces(run, "--ledger", tmp_path / "pipe").stdout == ""
    assert json.loads(os.read(reader, 4096))["sampled"] == 14
    os.close(reader)


@pytest.fixture
def long_run(tmp_path):
    """A run of three sessions whose JSON takes one megabyte in all."""
    calls = [make_call(f"s{i}", 0, [1] * 100_000, [2]) for i in range(3)]
    return factories.write_run(tmp_path / "run", *calls)


def test_a_full_disk_is_a_message_and_leaves_no_files(long_run, tmp_path):
    most = (100_000, 100_000)
    ended = subprocess.run(
        [ROLLTAP, "traces", long_run, "--out", tmp_path / "out"],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, most),
    )
    assert ended.returncode == 1
    assert "could not be written: " in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_killed_command_leaves_no_half_dataset(long_run, tmp_path, number):
    process = subprocess.Popen(
        [ROLLTAP, "traces", long_run, "--out", tmp_path / "out", "--json"],
        bufsize=0,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # background jobs ignore Ctrl-C
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with process, process.stdout:
        # the pipe is full, so the command blocks in the middle of its output
        assert process.stdout.read(1) == b"{"
        assert list(tmp_path.glob(".out.*"))
        process.send_signal(number)
        process.wait(timeout=120)
    assert not (tmp_path / "out").exists()
    if number != signal.SIGKILL:
        assert process.returncode == 130
        assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_closed_pipe_ends_it_quietly(run, tmp_path):
    command = [ROLLTAP, "traces", run, "--json", "--out", tmp_path / "out"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    _, said = process.communicate(timeout=120)
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("write", [traces, partial(export, "--to", "parquet")])
def test_a_folder_that_is_not_empty_is_refused_and_one_that_is_no_run_leaves_no_output(
    run, tmp_path, write
):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("")
    assert "has other files and no run: give a new folder" in write(run, "--out", out).stderr
    with pytest.raises(RunError, match="exists and is not an empty folder: choose a new one"):
        write(run, "--out", run)
    assert [path.name for path in out.iterdir()] == ["mine"]
    with pytest.raises(RunError, match="is not a run folder"):
        write(tmp_path, "--out", tmp_path / "new")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "run"}


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        (export, "--to parquet", "--to parquet takes --out DIR"),
        (export, "--to parquet --out x --repo a/b", "and neither --repo nor --public"),
        (export, "--to parquet --out x --public", "and neither --repo nor --public"),
        (export, "--to hub", "--to hub takes --repo ORG/NAME, and no --out"),
        (export, "--to hub --repo a/b --out x", "--to hub takes --repo ORG/NAME, and no --out"),
        (traces, "", "say where the traces go: --out DIR, --json, or --ledger FILE"),
        (traces, "--json --roles agent,boss", "'boss': choose among agent, subagent, compaction"),
        (traces, "--json --roles=", "'': choose among agent, subagent, compaction, auxiliary"),
    ],
)
def test_wrong_options_are_a_message_that_names_the_right_ones(run, command, options, message):
    ended = command(run, *options.split())
    assert ended.exit_code == 2
    assert message in ended.stderr


def test_inspect_shows_rewards_and_the_ledger_and_warns_of_nothing(run):
    told = run_rolltap("inspect", run, "--json")
    assert told.stderr == ""
    summary = json.loads(told.stdout)
    assert summary["ledger"]["trained"] == 7
    assert summary["steps"][0]["mean_reward"] == 0.25
    table = run_rolltap("inspect", run).stdout
    assert "left out: no_reward" in table
    assert "0.250" in table


@pytest.mark.parametrize(
    "command",
    [
        "inspect {run}",
        "inspect {run} {session}",
        "traces {run} --out {run}-traces",
        "traces {run} --json",
    ],
)
def test_a_row_that_was_changed_under_its_digest_is_told_with_what_to_do(run, command):
    change_rows(run, "calls", lambda row: row["call_id"] == "t-0", logprobs=[0.0, 0.0])
    line = command.format(run=run, session="t")
    ended = run_rolltap(*line.split())
    assert ended.returncode == 0
    assert "changed after " in ended.stderr
    assert "rolltap verify" in ended.stderr
    if command.startswith("inspect"):
        assert "changed after " in " ".join(ended.stdout.split())
