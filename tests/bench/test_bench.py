import json
import shutil
import subprocess
import sys

import pytest

from tests.bench.processes import ROOT

deep = pytest.mark.deep
"""Most benches run to their end in the deep suite only. The code that they measure has tests of its own."""


def measured(benchmark, *options):
    command = [sys.executable, "-m", f"tests.bench.{benchmark}", "--json", *map(str, options)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT).stdout)


@deep
def test_every_case_of_every_target_is_measured(tokenizer_folder):
    few = ["--connections", "1", "--connections", "2", "--requests", "2", "--chunks", "3", "--pace", "0.001"]
    rows = measured("recorder", "--model", tokenizer_folder, "--streams", 0, *few)["costs"]
    assert [(row["reply"], row["connections"], row["target"]) for row in rows] == [
        (reply, connections, target)
        for reply in ("at once", "streamed")
        for connections in (1, 2)
        for target in ("direct", "bare redirect", "recorder")
    ]
    for row in rows:
        assert all(value > 0 for value in row.values() if not isinstance(value, str | None)), row


@deep
def test_the_lag_of_the_loop_and_the_wait_of_others_are_measured_under_each_load(tokenizer_folder):
    small = ["--streams", 2, "--stream-tokens", 300, "--stream-seconds", 3, "--prompt-mb", 0.05]
    rows = measured("recorder", "--model", tokenizer_folder, "--connections", 0, *small)["stalls"]
    assert [(row["target"], row["load"]) for row in rows] == [
        (target, load)
        for target in ("bare redirect", "recorder")
        for load in ("2 streams of 300 tokens", "a prompt of 0.05 MB")
    ]
    for row in rows:
        assert row["status"] == "200"
        assert all(value > 0 for value in row.values() if not isinstance(value, str)), row


@deep
def test_a_soak_compares_every_token_across_the_kill_of_a_recorder(tokenizer_folder):
    options = ["--sessions", 8, "--seconds", 3, "--chaos-seconds", 1]
    result = measured("soak", "--model", tokenizer_folder, *options)
    phases = result["phases"]
    assert result["wrong"] == 0
    assert result["faults"] == {"kill -9 of a recorder": 1}
    assert sum(phase["received"] for phase in phases) >= 8
    assert sum(phase["tokens"] for phase in phases) > 8 * 40
    # every session, and therefore every API, went on after the kill
    assert all("a turn without a reply" not in phase["errors"] for phase in phases)


@deep
def test_prompts_are_measured_at_every_length(tokenizer_folder):
    rows = measured("prompts", "--model", tokenizer_folder, "--tokens", "1000", "--tokens", "2000")
    assert [row["tokens"] // 1000 for row in rows] == [1, 2]
    assert all(value > 0 for row in rows for value in row.values())


@deep
def test_the_lag_of_every_kind_of_growing_reply_is_measured(tokenizer_folder):
    rows = measured("streams", "--model", tokenizer_folder, "--streams", 2, "--tokens", 50, "--seconds", 0.2)
    assert len({row["reply"] for row in rows}) == 5
    assert all(row["us_per_token"] > 0 for row in rows)


def test_traces_are_measured_for_a_run_and_for_one_four_times_as_large():
    small, large = measured("traces", "--sessions", 2, "--turns", 3, "--tokens", 300)
    assert (small["sessions"], small["traces"], small["tokens"]) == (2, 2, 600)
    assert (large["sessions"], large["traces"], large["tokens"]) == (8, 8, 2400)
    assert all(value > 0 for row in (small, large) for value in row.values())


@pytest.mark.harness
def test_awkward_replies_of_a_session_are_continued(tokenizer_folder):
    if shutil.which("mini") is None:
        pytest.skip("mini-swe-agent is not installed: tests/run.sh installs it")
    (row,) = measured("continuity", "--model", tokenizer_folder, "--sessions", "1", "--harness", "mini-swe-agent")
    assert (row["sessions"], row["completed"], row["root"], row["rendered"]) == (1, 1, 1, 0)
    assert row["bridged"] == row["calls"] - 1 >= 3
    assert row["with context"] == 0


@deep
def test_every_sync_policy_and_every_file_is_measured(tmp_path):
    rows = measured("store", "--commits", 70, "--folder", tmp_path)
    assert [(row["sync"], row["at_once"]) for row in rows["commits"]] == [
        ("never", 1),
        ("session", 1),
        ("call", 1),
        ("call", 16),
        ("call", 64),
        ("disk alone", 1),
    ]
    assert all(row["commits_per_s"] > 0 for row in rows["commits"])
    sizes = {row["file"]: row["bytes"] for row in rows["sizes"]}
    assert sizes["compacted, zstd"] < sizes["compacted"] < sizes["as recorded"] < sizes["JSON Lines"] / 8


@deep
def test_a_box_and_its_way_out_are_measured_in_every_runtime_of_this_machine():
    few = ["--boxes", 1, "--rounds", 1, "--round-trips", 5, "--connections", 2, "--megabytes", 1]
    first, *others = measured("isolation", *few)
    assert first["runtime"] == "process"
    assert set(first["ratios"].values()) == {1.0}
    for row in (first, *others):
        assert all(row[column] > 0 for column in row["ratios"]), row
