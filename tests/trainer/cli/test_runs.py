"""`rolltap traces`, `export` and `inspect`."""

import json
import os
import resource
import signal
import subprocess
from dataclasses import asdict
from functools import partial

import pyarrow as pa
import pytest
from click.testing import CliRunner
from datasets import load_dataset, load_from_disk

from rolltap.addons.errors import RunError
from rolltap.addons.store.tables import TABLES, RunWriter, run_files
from rolltap.trainer.cli.runs import export_command, traces_command
from rolltap.trainer.runs.views.report import summarize
from tests import factories
from tests.trainer.cli.program import ROLLTAP, run_rolltap
from tests.trainer.outgoing import follow, json_lines, make_call, write_run


@pytest.fixture
def run(tmp_path):
    write_run(tmp_path / "run")
    return tmp_path / "run"


def traces(*arguments):
    return CliRunner().invoke(traces_command, [*map(str, arguments)], catch_exceptions=False)


def ledger_of(run, folder, *options):
    """Return the traces that a command prints and the ledger that it writes."""
    ended = traces(run, "--json", "--ledger", folder / "ledger.json", *options)
    assert ended.exit_code == 0
    return json_lines(ended.stdout), json.loads((folder / "ledger.json").read_text())


def test_json_prints_one_object_a_trace_and_nothing_else_on_stdout(run):
    main, *others = sorted(
        json_lines(traces(run, "--json").stdout), key=lambda trace: trace["prompt_ids"]
    )
    assert len(others) == 3
    expected = {
        "session_id": "s",
        "call_ids": ["s-0", "s-1"],
        "completion_mask": [1, 1, 0, 1, 1],
        "logprobs": [-1.0, -1.015625, 0.0, -2.0, -2.015625],
        **{"reward": 0.25, "task_id": "task", "harness": "pi", "role": "agent"},
    }
    assert {name: main[name] for name in expected} == expected
    assert main["prompt_ids"] + main["completion_ids"] == [1, 2, 3, 4, 5, 6, 7]
    assert main["weight_versions"][0] == {"version": "1", "start": 0, "end": 2}
    assert [span["start"] for span in main["continuity"]] == [0, 3]
    # those of sessions without a reward are there, too
    assert {trace["session_id"]: trace["reward"] for trace in others} == {
        "s": 0.25,
        "t": None,
        "u": None,
    }


def test_log_probabilities_are_printed_as_they_were_recorded(tmp_path):
    told = [-0.1, -1e-7, -12.34567, -0.3]
    call = make_call("s", 0, [1], [2, 3, 4, 5])
    call.logprobs = told
    factories.write_run(tmp_path, call)
    [trace] = json_lines(traces(tmp_path, "--json").stdout)
    assert trace["logprobs"] == told


def test_the_ledger_can_go_to_a_pipe(run, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    traces(run, "--ledger", tmp_path / "pipe")
    assert json.loads(os.read(reader, 4096))["sampled"] == 14
    os.close(reader)


def test_dataset_lines_summary_and_ledger_of_one_command_agree(run, tmp_path):
    printed, ledger = ledger_of(run, tmp_path, "--out", tmp_path / "out")
    assert list(load_from_disk(tmp_path / "out")) == printed
    ended = traces(run, "--out", tmp_path / "again", "--ledger", tmp_path / "alone.json")
    assert (ended.exit_code, ended.stdout) == (0, "")
    assert f"4 traces of 3 sessions in {tmp_path / 'again'}" in ended.stderr
    assert "left out: auxiliary" in ended.stderr
    assert ledger == {
        "sampled": 14,
        "trained": 7,
        "left_out": {"aborted": 1, "auxiliary": 1, "no_reward": 5},
    }
    assert (
        ledger == asdict(summarize(run).ledger) == json.loads((tmp_path / "alone.json").read_text())
    )
    assert ledger["trained"] == sum(
        sum(trace["completion_mask"]) for trace in printed if trace["reward"] is not None
    )


MERGED = [[1, 2, 3, 4, 5, 6, 7], [20, 21, 22, 23, 24], [40, 41, 42], [50, 51, 52, 53]]
REST = {"aborted": 1, "auxiliary": 1, "no_reward": 5}
BOTH_ROLES = [MERGED[0], [30, 31], *MERGED[2:]]


@pytest.mark.parametrize(
    ("option", "value", "tokens", "left_out"),
    [
        ("--strategy", "prefix_merging", MERGED, REST),
        ("--strategy", "per_request", [MERGED[0][:4], *MERGED], REST),
        ("--roles", "subagent", MERGED[1:2], {"aborted": 1, "auxiliary": 1, "agent": 9}),
        ("--roles", "agent, auxiliary", BOTH_ROLES, {"aborted": 1, "subagent": 3, "no_reward": 5}),
        ("--max-tokens", 4, [tokens[:4] for tokens in MERGED], {**REST, "over_length": 3}),
    ],
)
def test_an_option_decides_which_calls_become_traces_and_the_ledger_has_the_rest(
    run, tmp_path, option, value, tokens, left_out
):
    found, ledger = ledger_of(run, tmp_path, option, value)
    assert sorted(trace["prompt_ids"] + trace["completion_ids"] for trace in found) == tokens
    assert ledger["left_out"] == left_out
    assert ledger["sampled"] == 14 == ledger["trained"] + sum(left_out.values())


def test_the_strategy_tree_names_the_trace_that_begins_alike(run):
    writer, root = RunWriter(run), make_call("v", 0, [60, 61], [62])
    for call in (root, follow(root, 1, [63], [64]), follow(root, 2, [65], [66])):
        writer.add_call(call)
    writer.close()
    first, second = (
        t
        for t in json_lines(traces(run, "--json", "--strategy", "tree").stdout)
        if t["session_id"] == "v"
    )
    assert (first["shared_trace_id"], first["shared_tokens"]) == (None, 0)
    assert (second["shared_trace_id"], second["shared_tokens"]) == (first["trace_id"], 3)


@pytest.fixture
def long_run(tmp_path):
    """A run of three sessions whose JSON takes one megabyte in all."""
    return factories.write_run(
        tmp_path / "run", *(make_call(f"s{i}", 0, [1] * 100_000, [2]) for i in range(3))
    )


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
        assert (
            process.stdout.read(1) == b"{"
        )  # the pipe is full, so the command blocks in the middle of its output
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


def export(*arguments):
    return CliRunner().invoke(export_command, [*map(str, arguments)], catch_exceptions=False)


def test_parquet_is_written_and_counted(run, tmp_path):
    ended = export(run, "--to", "parquet", "--out", tmp_path / "out")
    assert (ended.exit_code, ended.stdout) == (0, "")
    assert f"14 records in {tmp_path / 'out'}" in ended.stderr
    calls = load_dataset(
        str(tmp_path / "out"), "calls", split="train", cache_dir=str(tmp_path / "cache")
    )
    assert calls.num_rows == 7


@pytest.mark.parametrize("write", [traces, partial(export, "--to", "parquet")])
def test_a_folder_that_is_not_empty_is_refused_and_one_that_is_no_run_leaves_no_output(
    run, tmp_path, write
):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    assert (
        "has other files and no run: give a new folder"
        in write(run, "--out", tmp_path / "out").stderr
    )
    with pytest.raises(RunError, match="exists and is not an empty folder: choose a new one"):
        write(run, "--out", run)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    with pytest.raises(RunError, match="is not a run folder"):
        write(tmp_path, "--out", tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        (export, "--to parquet", "--to parquet takes --out DIR"),
        (export, "--to parquet --out x --repo a/b", "and neither --repo nor --public"),
        (export, "--to parquet --out x --public", "and neither --repo nor --public"),
        (export, "--to hub", "--to hub takes --repo ORG/NAME, and no --out"),
        (export, "--to hub --repo a/b --out x", "--to hub takes --repo ORG/NAME, and no --out"),
        (export, "--out x", "Missing option '--to'"),
        (traces, "", "say where the traces go: --out DIR, --json, or --ledger FILE"),
        (
            traces,
            "--json --roles agent,boss",
            "'boss': choose among agent, subagent, compaction, auxiliary",
        ),
        (traces, "--json --roles=", "'': choose among agent, subagent, compaction, auxiliary"),
        (traces, "--ledger missing/ledger.json", "Could not open file"),
    ],
)
def test_wrong_options_are_a_message_that_names_the_right_ones(run, command, options, message):
    ended = command(run, *options.split())
    assert ended.exit_code == (1 if "missing" in options else 2)
    assert message in ended.stderr


def test_inspect_shows_rewards_and_the_ledger(tmp_path):
    rewards = [0.0, 1.0, None]
    calls = [factories.make_call(0, [1], [2, 3], session_id=f"s{i}", version="4") for i in range(3)]
    rows = [
        factories.make_session(f"s{i}", reward=reward, policy_version="4")
        for i, reward in enumerate(rewards)
    ]
    factories.write_run(tmp_path, *calls, *rows)
    told = run_rolltap("inspect", tmp_path, "--json")
    summary = json.loads(told.stdout)
    assert told.stderr == ""  # a sound run is not warned of
    assert summary["ledger"] == {"sampled": 6, "trained": 4, "left_out": {"no_reward": 2}}
    assert summary["steps"] == [
        {"policy_version": "4", "sessions": 3, "mean_reward": 0.5, "best_reward": 1.0}
    ]
    table = run_rolltap("inspect", tmp_path).stdout
    assert "left out: no_reward" in table
    assert "0.500" in table


@pytest.fixture
def changed_run(tmp_path):
    """Write a run, and change its first call and leave its digest as it is."""
    write_run(tmp_path / "run")
    first, *_ = run_files(tmp_path / "run", "calls")
    rows = pa.ipc.open_stream(first.read_bytes()).read_all().to_pylist()
    rows[0]["logprobs"] = [0.0] * len(rows[0]["logprobs"])
    with pa.OSFile(str(first), "wb") as file, pa.ipc.new_stream(file, TABLES["calls"]) as writer:
        writer.write_table(pa.Table.from_pylist(rows, TABLES["calls"]))
    return tmp_path / "run", rows[0]["session_id"]


@pytest.mark.parametrize(
    "arguments",
    [
        "inspect {run}",
        "inspect {run} {session}",
        "traces {run} --out {run}-traces",
        "traces {run} --json",
    ],
)
def test_a_changed_row_is_told_with_what_to_do(changed_run, arguments):
    run, session = changed_run
    ended = run_rolltap(*arguments.format(run=run, session=session).split())
    assert ended.returncode == 0
    assert "changed after " in ended.stderr
    assert "rolltap verify" in ended.stderr
    if arguments.startswith("inspect"):
        assert "changed after " in " ".join(ended.stdout.split())
