import json
import shutil
import subprocess
import sys

import pytest

from tests.bench.processes import ROOT
from tests.conftest import vllm_program

deep = pytest.mark.deep
"""Most benches run to their end in the deep suite only. The code that they measure has tests of its
own."""


def measured(benchmark, *options):
    command = [sys.executable, "-m", f"tests.bench.{benchmark}", "--json", *map(str, options)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT).stdout)


def assert_above_zero(rows):
    for row in rows:
        assert all(value > 0 for value in row.values() if isinstance(value, int | float)), row


@deep
def test_every_case_of_every_target_is_measured(tokenizer_folder):
    few = [
        "--connections",
        "1",
        "--connections",
        "2",
        "--requests",
        "2",
        "--chunks",
        "3",
        "--pace",
        "0.001",
    ]
    found = measured("recorder", "--model", tokenizer_folder, "--streams", 0, *few)
    assert list(found) == ["replies at once", "streamed"]
    for rows in found.values():
        assert [(row["connections"], row["target"]) for row in rows] == [
            (connections, target)
            for connections in (1, 2)
            for target in ("bare redirect", "recorder")
        ]
        assert_above_zero(rows)


@deep
def test_the_lag_of_the_loop_and_the_wait_of_others_are_measured_under_each_load(tokenizer_folder):
    small = ["--streams", 2, "--stream-tokens", 300, "--stream-seconds", 3, "--prompt-mb", 0.05]
    rows = measured("recorder", "--model", tokenizer_folder, "--connections", 0, *small)[
        "under load"
    ]
    assert [(row["target"], row["load"], row["status"]) for row in rows] == [
        (target, load, "200")
        for target in ("bare redirect", "recorder")
        for load in ("2 streams of 300 tokens", "a prompt of 0.05 MB")
    ]
    assert_above_zero(rows)


@deep
def test_a_soak_compares_every_token_across_the_kill_of_a_recorder(tokenizer_folder):
    options = ["--sessions", 8, "--seconds", 3, "--chaos-seconds", 1]
    phases = measured("soak", "--model", tokenizer_folder, *options)["phases"]
    assert [phase["wrong"] for phase in phases] == [0, 0]
    assert phases[1]["faults"] == {"kill -9 of a recorder": 1}
    assert sum(phase["received"] for phase in phases) >= 8
    assert sum(phase["tokens"] for phase in phases) > 8 * 40
    # every session, and therefore every API, went on after the kill
    assert all("a turn without a reply" not in phase["errors"] for phase in phases)


@deep
def test_prompts_are_measured_at_every_length(tokenizer_folder):
    (rows,) = measured(
        "prompts", "--model", tokenizer_folder, "--tokens", "1000", "--tokens", "2000"
    ).values()
    assert [row["tokens"] // 1000 for row in rows] == [1, 2]
    assert_above_zero(rows)


@deep
def test_long_conversations_are_measured(tokenizer_folder):
    small = [
        "--tokens",
        2000,
        "--turns",
        3,
        "--trajectory-tokens",
        3000,
        "--sessions",
        2,
        "--processes",
        1,
    ]
    found = measured(
        "conversations",
        "--model",
        tokenizer_folder,
        *small,
        "--session-turns",
        12,
        "--reply-seconds",
        0.05,
    )
    assert list(found) == ["turns", "trajectory", "saturated"]
    assert [row["API"] for row in found["turns"]] == ["openai-chat", "anthropic"]
    for rows in found.values():
        assert_above_zero(rows)


@deep
def test_the_view_of_a_run_is_measured(tokenizer_folder):
    small = ["--sessions", 2, "--calls", 3, "--tokens", 300]
    found = measured("view", "--model", tokenizer_folder, *small)
    assert (found["run"][0]["tokens"], found["file"][0].pop("wrong")) == (600, 0)
    for rows in found.values():
        assert_above_zero(rows)


@deep
@pytest.mark.engine
def test_publications_are_measured_on_the_disk_and_in_memory(tokenizer_folder):
    small = ["--vllm", vllm_program(), "--layers", 1, "--rounds", 1]
    ((disk, memory),) = measured("publish", "--model", tokenizer_folder, *small).values()
    assert (disk["folder"], memory["folder"]) == ("disk", "/dev/shm")
    assert disk["most_gb"] == memory["most_gb"]  # two checkpoints
    assert_above_zero([disk, memory])


def test_traces_are_measured_for_a_run_and_for_one_four_times_as_large():
    ((small, large),) = measured("traces", "--sessions", 2, "--turns", 3, "--tokens", 300).values()
    assert (small["sessions"], small["traces"], small["tokens"]) == (2, 2, 600)
    assert (large["sessions"], large["traces"], large["tokens"]) == (8, 8, 2400)
    assert_above_zero([small, large])


def test_a_table_has_a_line_for_each_figure_and_the_model_must_exist(tmp_path):
    command = [
        sys.executable,
        "-m",
        "tests.bench.traces",
        "--sessions",
        "1",
        "--turns",
        "1",
        "--tokens",
        "10",
    ]
    output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    assert {"sessions", "tokens", "traces/s"} <= {
        line.split()[1] for line in output.splitlines() if len(line.split()) > 1
    }
    command = [sys.executable, "-m", "tests.bench.prompts", "--model", tmp_path / "missing"]
    assert (
        "make_model.py" in subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stderr
    )


@deep
@pytest.mark.harness
def test_awkward_replies_of_a_session_are_continued(tokenizer_folder):
    if shutil.which("mini") is None:
        pytest.skip("mini-swe-agent is not installed: tests/run.sh installs it")
    options = ["--model", tokenizer_folder, "--sessions", "1", "--harness", "mini-swe-agent"]
    ((row,),) = measured("continuity", *options).values()
    assert (row["sessions"], row["completed"], row["root"], row["rendered"]) == (1, 1, 1, 0)
    assert row["bridged"] == row["calls"] - 1 >= 3
    assert row["with context"] == 0


@deep
def test_every_sync_policy_and_every_file_is_measured(tmp_path):
    found = measured("store", "--commits", 70, "--folder", tmp_path)
    assert [(row["sync"], row["calls at once"]) for row in found["commits"]] == [
        ("never", 1),
        ("session", 1),
        ("call", 1),
        ("call", 16),
        ("call", 64),
        ("disk alone", 1),
    ]
    assert_above_zero(found["commits"])
    sizes = {row["file"]: row["bytes"] for row in found["sizes"]}
    assert (
        sizes["compacted, zstd"]
        < sizes["compacted"]
        < sizes["as recorded"]
        < sizes["JSON Lines"] / 8
    )


@deep
def test_a_box_and_its_way_out_are_measured_in_every_runtime_of_this_machine():
    few = ["--boxes", 1, "--rounds", 1, "--round-trips", 5, "--connections", 2, "--megabytes", 1]
    (rows,) = measured("isolation", *few).values()
    assert rows[0]["runtime"] == "process"
    assert {value for column, value in rows[0].items() if column.endswith("ratio")} == {1.0}
    assert_above_zero(rows)


def test_slots_of_their_own_keep_more_sessions_running_than_one_slot_for_all():
    (rows,) = measured("queue", "--sessions", 160, "--slots", 8).values()
    busy = {row["case"]: row["busy"] for row in rows}
    assert busy["one slot for all"] < busy["ready 0"] < busy["ready 4"] <= 1


@deep
def test_a_training_is_measured_by_how_far_its_rollouts_may_run_ahead(tokenizer_folder):
    tables = measured(
        "rollouts", "--ahead", "--model", tokenizer_folder, "--median", 0.02, "--steps", 3
    )
    for rows in tables.values():
        assert [(row["max_staleness"], row["oldest"] <= row["max_staleness"]) for row in rows] == [
            (0, True),
            (1, True),
            (2, True),
        ]
        assert all(row["steps an hour"] > 0 and 0 < row["engine busy"] <= 1 for row in rows)


@deep
def test_the_phases_of_a_rollout_are_measured_case_by_case(tokenizer_folder):
    (rows,) = measured(
        "rollouts", "--model", tokenizer_folder, "--median", 0.02, "--slots", 8
    ).values()
    assert [row["case"] for row in rows] == [
        "judges hold a slot",
        "ready 0",
        "ready 4, judges not warmed",
        "ready 4",
    ]
    assert_above_zero(rows)


@deep
def test_a_fleet_is_measured_by_its_nodes_and_a_larger_one_in_virtual_time(tokenizer_folder):
    arguments = "--ray", "--model", tokenizer_folder, "--median", 0.1, "--slots", 2
    placed, nodes, way = measured("rollouts", *arguments).values()
    assert [row["sessions"] for row in placed] == [10_000] * 2
    assert placed[0]["groups on one node"] == 1 > placed[1]["groups on one node"] > 0.9
    assert [(row["nodes"], row["sessions"]) for row in nodes] == [(1, 16), (2, 32), (4, 64)]
    assert_above_zero([*nodes, *way])


@deep
def test_a_service_is_measured_with_its_recorder_and_no_session_fails(tokenizer_folder):
    ((row,),) = measured(
        "service", "--model", tokenizer_folder, "--sessions", 8, "--rounds", 1, "--turns", 1
    ).values()
    assert (row.pop("wrong"), row["sessions"], row["calls"]) == (0, 8, 8)
    assert_above_zero([row])


@deep
def test_the_lag_of_a_driver_with_many_sessions_is_measured(tokenizer_folder):
    few = ["--sessions", 8, "--turns", 1, "--runtime", "process"]
    [row] = measured("at_once", "--model", tokenizer_folder, *few)["driver"]
    assert (row["sessions"], row["calls"], row["wrong"]) == (8, 8, 0)
    assert row["loop lag worst"] > 0
