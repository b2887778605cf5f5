"""Most benches run to their end in the deep suite only. The code that they measure has tests of its
own."""

import json
import shutil
import subprocess
import sys

import pytest

from tests.bench.processes import ROOT
from tests.bench.walk import walk
from tests.conftest import vllm_program

deep = pytest.mark.deep
MOST_FILES = 33
"""Files of `addons` that a streamed, continued Chat call visits. Whoever makes them fewer lowers
it."""


def start(options, **how):
    """Run a bench with options that are words."""
    command = [sys.executable, "-m", *f"tests.bench.{options}".split()]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, **how)


@pytest.fixture
def measured(tokenizer_folder):
    """Return a function that runs a bench, and returns its tables, in which no number is 0.

    `{model}` in its options is a folder with a tokenizer. Figures that are `zero` may be 0.
    """

    def measured(options, *zero):
        ended = start(options.format(model=f"--json --model {tokenizer_folder}"), check=True)
        found = json.loads(ended.stdout)
        for rows in found.values():
            for row in rows:
                for figure, value in row.items():
                    if isinstance(value, int | float) and figure not in zero:
                        assert value > 0, row
        return found

    return measured


def column(rows, *figures):
    return [" ".join(str(row[figure]) for figure in figures) for row in rows]


RECORDER = "recorder {model} --streams 0 --requests 2 --chunks 3 --pace 0.001"
STALLS = "recorder {model} --connections 0 --streams 2 --stream-tokens 300 --stream-seconds 3"
CONVERSATIONS = "conversations {model} --tokens 2000 --turns 3 --trajectory-tokens 3000"
APIS = ["openai-chat", "anthropic"]
TARGETS = ["1 bare redirect", "1 recorder", "2 bare redirect", "2 recorder"]


@deep
@pytest.mark.parametrize(
    ("options", "figures", "expected"),
    [
        pytest.param(
            f"{RECORDER} --connections 1 --connections 2",
            ["connections", "target"],
            {"replies at once": TARGETS, "streamed": TARGETS},
            id="the recorder beside a bare redirect",
        ),
        pytest.param(
            f"{STALLS} --prompt-mb 0.05",
            ["target", "load", "status"],
            {
                "under load": [
                    "bare redirect 2 streams of 300 tokens 200",
                    "bare redirect a prompt of 0.05 MB 200",
                    "recorder 2 streams of 300 tokens 200",
                    "recorder a prompt of 0.05 MB 200",
                ]
            },
            id="the lag of the loop under each load",
        ),
        pytest.param(
            CONVERSATIONS,
            ["API"],
            {"turns": APIS, "trajectory": APIS},
            id="long conversations",
        ),
        pytest.param(
            "prompts {model} --tokens 1000 --tokens 2000",
            [],
            {"CPU of a call's prompt": ["", ""]},
            id="prompts of each length",
        ),
    ],
)
def test_every_case_is_measured(measured, options, figures, expected):
    found = measured(options)
    assert {title: column(rows, *figures) for title, rows in found.items()} == expected


@deep
def test_a_soak_compares_every_token_across_the_kill_of_a_recorder(tokenizer_folder):
    options = f"--model {tokenizer_folder} --sessions 8 --seconds 3 --chaos-seconds 1"
    phases = json.loads(start(f"soak --json {options}", check=True).stdout)["phases"]
    assert [phase["wrong"] for phase in phases] == [0, 0]
    assert phases[1]["faults"] == {"kill -9 of a recorder": 1}
    assert sum(phase["received"] for phase in phases) >= 8
    assert sum(phase["tokens"] for phase in phases) > 8 * 40
    # every session, and therefore every API, went on after the kill
    assert all("a turn without a reply" not in phase["errors"] for phase in phases)


@deep
def test_the_view_of_a_run_is_measured(measured):
    found = measured("view {model} --sessions 2 --turns 3 --tokens 300", "wrong")
    assert (found["run"][0]["tokens"], found["file"][0]["wrong"]) == (600, 0)


@deep
@pytest.mark.engine
def test_publications_are_measured_on_the_disk_and_in_memory(measured):
    ((disk, memory),) = measured(
        f"publish {{model}} --vllm {vllm_program()} --layers 1 --rounds 1"
    ).values()
    assert (disk["folder"], memory["folder"]) == ("disk", "/dev/shm")
    assert disk["most_gb"] == memory["most_gb"]  # two checkpoints


def test_traces_are_measured_for_a_run_and_for_one_four_times_as_large(measured):
    (rows,) = measured("traces --json --sessions 2 --turns 3 --tokens 300").values()
    assert column(rows, "sessions", "traces", "tokens") == ["2 2 600", "8 8 2400"]


def test_a_table_has_a_line_for_each_figure_and_the_model_must_exist(tmp_path):
    lines = start("traces --sessions 1 --turns 1 --tokens 10").stdout.splitlines()
    figures = {line.split()[1] for line in lines if len(line.split()) > 1}
    assert figures >= {"sessions", "tokens", "traces/s"}
    refused = start(f"prompts --model {tmp_path / 'missing'}", stderr=subprocess.PIPE)
    assert "make_model.py" in refused.stderr


@deep
@pytest.mark.harness
def test_awkward_replies_of_a_session_are_continued(measured):
    if shutil.which("mini") is None:
        pytest.skip("mini-swe-agent is not installed: tests/run.sh installs it")
    options = "continuity {model} --sessions 1 --harness mini-swe-agent"
    ((row,),) = measured(options, "rendered", "with context").values()
    assert (row["sessions"], row["completed"], row["root"], row["rendered"]) == (1, 1, 1, 0)
    assert row["bridged"] == row["calls"] - 1 >= 3
    assert row["with context"] == 0


@deep
def test_every_sync_policy_and_every_file_is_measured(measured, tmp_path):
    found = measured(f"store --json --commits 70 --folder {tmp_path}")
    policies = ["never 1", "session 1", "call 1", "call 16", "call 64", "disk alone 1"]
    assert column(found["commits"], "sync", "calls at once") == policies
    sizes = {row["file"]: row["bytes"] for row in found["sizes"]}
    assert sizes["compacted, zstd"] < sizes["compacted"] < sizes["as recorded"]
    assert sizes["as recorded"] < sizes["JSON Lines"] / 8


@deep
def test_a_box_and_its_way_out_are_measured_in_every_runtime_of_this_machine(measured):
    few = "--boxes 1 --rounds 1 --round-trips 5 --connections 2 --megabytes 1"
    (rows,) = measured(f"isolation --json {few}").values()
    assert rows[0]["runtime"] == "process"
    assert {value for figure, value in rows[0].items() if figure.endswith("ratio")} == {1.0}


def test_slots_of_their_own_keep_more_sessions_running_than_one_slot_for_all(measured):
    (rows,) = measured("queue --json --sessions 160 --slots 8", "groups overtaken").values()
    busy = {row["case"]: row["busy"] for row in rows}
    assert busy["one slot for all"] < busy["ready 0"] < busy["ready 4"] <= 1


@deep
def test_a_training_is_measured_by_how_far_its_rollouts_may_run_ahead(measured):
    options = "rollouts --json --median 0.02 --steps 3"
    for rows in measured(options, "max_staleness", "oldest", "stale").values():
        assert column(rows, "max_staleness") == ["0", "1", "2"]
        assert all(row["oldest"] <= row["max_staleness"] for row in rows)
        assert all(row["engine busy"] <= 1 for row in rows)


@deep
def test_a_fleet_is_measured_by_its_nodes(measured):
    nodes, _ = measured("fleet {model} --median 0.1 --slots 2").values()
    assert column(nodes, "nodes", "sessions") == ["1 16", "2 32", "4 64"]


@deep
@pytest.mark.parametrize(
    "bench", ["service {model} --rounds 1", "at_once {model} --runtime process"]
)
def test_many_sessions_at_once_are_measured_and_none_fails(measured, bench):
    ((row,),) = measured(f"{bench} --sessions 8 --turns 1", "wrong").values()
    assert (row["wrong"], row["sessions"], row["calls"]) == (0, 8, 8)


def test_a_call_visits_few_files_from_the_proxy_to_the_store(
    tmp_path, scripted_engine, tokenizer_folder
):
    found = walk(tmp_path, scripted_engine, tokenizer_folder)
    assert len(found.files) <= MOST_FILES, found.files
    folders = {file.partition("/")[0] for file in found.files}
    assert folders >= {"proxy", "dialects", "endpoint", "prompts", "engine", "store"}
    # a hop is a call from one file to another
    assert ("endpoint/generation.py", "engine/pool.py") in found.hops
    for caller, callee in found.hops:
        assert caller != callee
        assert {caller, callee} <= {*found.files}
