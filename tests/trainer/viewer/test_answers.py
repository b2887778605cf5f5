import json
import os
import shutil
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest

from rolltap.addons.errors import InputError, RunError
from rolltap.addons.store.records import Event, json_text
from rolltap.addons.store.tables import RunWriter, run_files
from rolltap.trainer.runs.views.report import summarize
from rolltap.trainer.traces.trained import trained_batch
from rolltap.trainer.viewer.answers import answer
from rolltap.trainer.viewer.reader import RunReader, UnknownError
from tests.factories import START, add_rows, make_call, make_session, write_run
from tests.trainer.viewer.runs import read_all, reading, write

STORED = Path(__file__).parents[2] / "stored_run" / "run"


@pytest.fixture(scope="module")
def written(tmp_path_factory, tokenizer, tokenizer_folder):
    return write(tmp_path_factory.mktemp("view") / "run", tokenizer, tokenizer_folder)


@pytest.fixture(scope="module")
def reader(written):
    with reading(written[0]) as reader:
        reader.text()
        yield reader


def sent(reader, path):
    """Return an answer as a client receives it."""
    return json.loads(json_text(answer(reader, path)))


def test_the_run_is_the_summary_that_inspect_prints_and_its_groups(reader, written):
    found = sent(reader, "api/run")
    summary = json.loads(json_text(summarize(written[0]).to_json()))
    del summary["session_rows"]
    assert found["summary"] == summary
    assert found["read"] == {"sessions": 3, "of": 3}
    about = {"path": str(written[0]), "name": "run", "tokenizer": None, "recording": False}
    assert found["run"].items() >= about.items()
    group = {"group_id": "g", "task_id": "t", "sessions": ["other", "s"], "rewards": [0.0, 1.0]}
    assert found["groups"][0] == {**group, "signal": True}
    assert (found["faults"], found["training"]) == ([], None)


def test_sessions_have_their_rows_and_counts_in_the_order_of_their_starts(reader):
    first, second, last = sent(reader, "api/sessions")["sessions"]
    assert [each["session_id"] for each in (first, second, last)] == ["other", "s", "a/b c"]
    assert (
        second.items() >= {"reward": 1.0, "status": "completed", "read": True, "calls": 4}.items()
    )
    assert second["kinds"] == {"root": 2, "bridged": 1, "rendered": 1}
    assert (second["faults"], second["retries"]) == (1, 1)
    assert second["sampled"] == second["trained"] + sum(second["left_out"].values())
    assert (
        last.items()
        >= {
            "status": "unknown",
            "reward": None,
            "group_id": "a/b c",
            "sampled": 2,
            "trained": 0,
        }.items()
    )


def test_a_session_has_its_conversations_its_events_and_its_group(reader):
    found = sent(reader, "api/sessions/s")
    assert [(lane["name"], lane["calls"]) for lane in found["lanes"]] == [
        ("main", ["0", "1", "3"]),
        ("side questions", ["2"]),
    ]
    first, second, *_ = found["calls"]
    assert first["messages"] == [{"role": "user", "content": "Count the lines"}]
    assert (second["parent_id"], second["reply"]["content"]) == ("0", "There are 3.")
    assert [(event["kind"], event["call_id"]) for event in found["events"]] == [
        ("fault", "1"),
        ("replayed", "1"),
    ]
    assert [(each["session_id"], each["reward"]) for each in found["group"]] == [
        ("other", 0.0),
        ("s", 1.0),
    ]
    assert (found["judge"], found["patch"], found["log"]) == (None, None, None)


def test_the_events_of_a_session_are_in_the_order_of_their_times(tmp_path):
    late = Event(kind="fault", session_id="s", at=START + timedelta(seconds=2))
    early = Event(kind="joined", session_id="s", at=START)
    write_run(tmp_path, make_call("a", [1]), late, early, make_session("s"))
    with reading(tmp_path) as reader:
        found = sent(reader, "api/sessions/s")
    assert [event["kind"] for event in found["events"]] == ["joined", "fault"]


def test_a_session_has_the_output_of_its_last_judge(reader):
    logs = reader.run / "logs"
    logs.mkdir(exist_ok=True)
    for name in ("judge.log", "r0.judge.log"):
        (logs / f"other.{name}").write_text(name)
    assert sent(reader, "api/sessions/other")["judge"] == "r0.judge.log"


def test_an_id_with_a_slash_is_one_name(reader):
    assert sent(reader, f"api/sessions/{quote('a/b c', safe='')}")["session"] is None
    assert sent(reader, f"api/sessions/{quote('a/b c', safe='')}/calls/5")["call"][
        "completion_ids"
    ] == [3, 4]


def test_a_call_has_its_tokens_their_text_and_who_sampled_them(reader, written):
    first, second, *_ = written[1]
    found = sent(reader, "api/sessions/s/calls/1")
    assert found["call"]["prompt_ids"] == list(second.prompt_ids)
    assert found["call"]["logprobs"] == second.logprobs
    prompt, start = len(first.prompt_ids) + len(first.completion_ids), len(first.prompt_ids)
    assert found["sampled"] == [{"call_id": "0", "start": start, "end": prompt}]
    assert (
        "".join(piece[0] for piece in found["prompt_pieces"])
        == "You are an agent. café 🙂I look.<|im_end|>three files"
    )
    assert sum(piece[1] for piece in found["prompt_pieces"]) == len(second.prompt_ids)
    assert found["completion_pieces"][-1] == ["<|im_end|>", 1, "special"]
    assert (found["previous"], found["next"], found["parent_id"]) == ("0", "2", "0")
    assert found["excluded"] == []
    side = sent(reader, "api/sessions/s/calls/2")
    assert side["excluded"] == [
        {"start": 0, "end": len(side["call"]["completion_ids"]), "reason": "auxiliary"}
    ]


def test_pieces_end_where_sampled_tokens_begin_though_a_character_does_not(
    tmp_path, tokenizer, tokenizer_folder
):
    face = tokenizer("🙂", add_special_tokens=False)["input_ids"]
    first = make_call(0, face[:1], face[1:])
    second = make_call(1, [1], [2], after=first)
    folder = write_run(tmp_path / "run", first, second, make_session(), model=str(tokenizer_folder))
    with reading(folder) as reader:
        pieces = sent(reader, "api/sessions/s/calls/1")["prompt_pieces"]
        assert sum(piece[1] for piece in pieces[:1]) == 1


def test_where_a_rendered_prompt_differs_is_shown_as_text(reader):
    found = sent(reader, "api/sessions/s/calls/3")
    assert found["difference"]["call_id"] in ("0", "1")
    text = found["difference_text"]
    assert text["common"].endswith("caf") or text["common"].endswith(" ")
    assert text["recorded"] != text["rendered"]


def test_text_is_found_with_the_words_around_it_whatever_its_capitals(reader):
    assert sent(reader, "api/search?q=count%20THE") == {
        "sessions": [{"session_id": "s", "call_id": "0", "text": "Count the lines"}],
        "cut": False,
    }
    assert sent(reader, "api/search?q=%22")["sessions"] != []  # in the arguments of a tool call
    with pytest.raises(InputError, match="has no 'q'"):
        answer(reader, "api/search")


@pytest.mark.parametrize(
    "path",
    [
        "api",
        "api/nothing",
        "api/sessions/none",
        "api/sessions/s/calls/none",
        "api/sessions/s/more",
        "api/sessions/../s",
    ],
)
def test_what_is_not_there_is_said(reader, path):
    with pytest.raises(UnknownError):
        answer(reader, path)


def test_texts_that_attack_a_page_stay_data(tmp_path):
    evil = '</script><script>alert(1)</script>\u2028"\\\x00'
    call = make_call(0, reply=json.dumps({"role": "assistant", "content": evil}), model=evil)
    folder = write_run(tmp_path / "run", call, make_session(error=evil, task_id=evil))
    with reading(folder) as reader:
        found = sent(reader, "api/sessions/s")
        assert (found["calls"][0]["reply"]["content"], found["session"]["error"]) == (evil, evil)


def test_the_session_of_another_machine_cannot_name_a_file_outside_of_the_logs(tmp_path):
    folder = write_run(
        tmp_path / "run", *(make_call(0, session_id=name) for name in ("../secret", "link", "s"))
    )
    (folder / "logs").mkdir()
    (tmp_path / "run" / "secret.log").write_text("private")
    (folder / "logs" / "link.log").symlink_to(tmp_path / "run" / "secret.log")
    (folder / "logs" / "s.log").write_text("x" * 300_000 + "the end")
    (folder / "logs" / "s.diff").write_text("+ a line")
    with reading(folder) as reader:
        assert sent(reader, f"api/sessions/{quote('../secret', safe='')}")["log"] is None
        assert sent(reader, "api/sessions/link")["log"] is None
        found = sent(reader, "api/sessions/s")
    assert found["patch"] == "+ a line"
    note, _, end = found["log"].partition("\n")
    assert note == "[262,144 of 300,007 bytes; the whole is in logs/s.log]"
    assert end.endswith("xthe end")


def test_rewards_are_there_before_any_call_is_read(written):
    reader = RunReader(written[0])
    assert reader.overview().progress == {"sessions": 0, "of": 2}
    found = sent(reader, "api/run")
    assert found["summary"]["outcomes"][0]["mean_reward"] == 0.5
    assert found["summary"]["calls"] == {}
    assert [row["calls"] for row in sent(reader, "api/sessions")["sessions"]] == [None, None]


def test_a_run_that_grows_is_followed_also_while_it_is_compacted(tmp_path):
    folder = write_run(tmp_path / "run", make_call(0), make_call(0, session_id="a"))
    with reading(folder) as reader, RunWriter(folder) as writer:
        before = reader.version
        assert sent(reader, "api/sessions/s")["session"] is None
        writer.add_call(make_call(1, [2, 5]))
        writer.add_session(make_session(reward=0.5))
        assert sent(reader, "api/run")["run"]["recording"]
        assert sent(reader, "api/sessions/s")["session"]["reward"] == 0.5
        read_all(reader)
        assert reader.changes(before) == ["s"]
        (row,) = (
            row for row in sent(reader, "api/sessions")["sessions"] if row["session_id"] == "s"
        )
        assert (row["calls"], row["reward"]) == (2, 0.5)
        before = reader.version
        writer.close()
        read_all(reader)
        assert len(sent(reader, "api/sessions/s")["calls"]) == 2
        assert reader.version == before
        assert not sent(reader, "api/run")["run"]["recording"]


def test_a_session_of_which_a_reward_is_changed_is_read_again(tmp_path):
    folder = write_run(tmp_path / "run", make_call(0), make_session(reward=0.0))
    with reading(folder) as reader:
        add_rows(folder, make_session(reward=1.0, revision=1))
        read_all(reader)
        assert sent(reader, "api/run")["groups"][0]["rewards"] == [1.0]
        assert [row["reward"] for row in sent(reader, "api/sessions/s")["revisions"]] == [0.0, 1.0]


def test_an_empty_run_is_shown_and_a_folder_that_is_no_run_says_so(tmp_path):
    with reading(write_run(tmp_path / "empty")) as reader:
        assert sent(reader, "api/run")["read"] == {"sessions": 0, "of": 0}
        assert sent(reader, "api/sessions") == {"sessions": []}
    with pytest.raises(RunError, match="is not a run folder"):
        answer(RunReader(tmp_path), "api/run")


def test_of_a_damaged_run_the_rest_is_shown_and_the_damage_named(tmp_path):
    folder = write_run(
        tmp_path / "run",
        make_call(0),
        make_call(0, session_id="a"),
        make_session(),
        make_session("a"),
    )
    (calls,) = run_files(folder, "calls")
    data = bytearray(calls.read_bytes())
    data[-3000:-2900] = os.urandom(100)
    calls.write_bytes(data)
    shutil.copy(calls, folder / "calls-copy.arrow")
    with reading(folder) as reader:
        found = sent(reader, "api/run")
        assert found["read"] == {"sessions": 2, "of": 2}
        assert any(calls.name in fault or "twice" in fault for fault in found["faults"])
        assert len(sent(reader, "api/sessions")["sessions"]) == 2


def test_a_session_whose_rows_no_recorder_wrote_is_named_and_the_others_are_read(tmp_path):
    strange = make_call(0, session_id="strange", reply='{"tool_calls": [7]}', messages="{")
    with reading(
        write_run(tmp_path / "run", strange, make_session("strange"), make_call(0), make_session())
    ) as reader:
        found = sent(reader, "api/run")
        assert found["read"] == {"sessions": 2, "of": 2}
        assert next(row["calls"] for row in sent(reader, "api/sessions")["sessions"]) == 1


def test_metrics_of_a_training_are_shown_and_damaged_ones_are_a_fault(tmp_path):
    folder = write_run(tmp_path / "run", make_call(0))
    with reading(folder) as reader:
        (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2}\n{"ste')
        found = sent(reader, "api/run")
        assert found["training"] == {
            "metrics": [{"step": 1, "loss": 0.5}, {"step": 2}],
            "steps": [],
        }
        (folder / "metrics.jsonl").write_text("nonsense\n")
        found = sent(reader, "api/run")
        assert found["training"] is None
        assert "line 1 is not a step's metrics" in found["faults"][0]


def test_what_a_step_trained_is_shown_of_the_run_the_session_and_the_call(tmp_path):
    first = make_call(0, [1], [2, 3, 4])
    second = make_call(1, [5], [6, 7], after=first)
    folder = write_run(tmp_path / "run", first, second, make_session())
    row = {
        "session_id": "s",
        "group_id": "g",
        "step": 1,
        "version": "run.0.0",
        "reward": 1.0,
        "advantage": 0.5,
        "reason": None,
        "sampled": 5,
        "trained": 4,
        "left_out": [{"call_id": "1", "start": 1, "end": 2, "reason": "over_length"}],
        "spans": [{"call_id": "0", "start": 0, "end": 3}, {"call_id": "1", "start": 0, "end": 1}],
        "differences": np.array([0.1, 0.2, -0.3, -0.001], np.float16),
        "weights": np.array([1, 1, 1, 0.25], np.float32),
    }
    with RunWriter(folder) as writer:
        writer.add_batch("trained", trained_batch([row]))
    with reading(folder) as reader:
        counts = {
            "step": 1,
            "sessions": 1,
            "sampled": 5,
            "trained": 4,
            "left_out": {"over_length": 1},
        }
        assert sent(reader, "api/run")["training"]["steps"] == [counts]
        assert sent(reader, "api/sessions")["sessions"][0]["advantage"] == 0.5
        found = sent(reader, "api/sessions/s")
        assert [(each["step"], each["trained"], each["left_out"]) for each in found["trained"]] == [
            (1, 4, {"over_length": 1})
        ]
        assert found["group"][0]["advantage"] == 0.5
        call = sent(reader, "api/sessions/s/calls/1")
        (part,) = call["trained"]
        assert (part["start"], part["end"], part["differences"], part["weights"]) == (
            0,
            1,
            [-0.001],
            [0.25],
        )
        assert call["excluded"] == [{"start": 1, "end": 2, "reason": "over_length"}]


def test_two_sessions_are_compared_up_to_their_first_difference(reader):
    found = sent(reader, "api/compare?a=other&b=s")
    assert (found["a"], found["b"], found["messages"]["common"]) == ("other", "s", 0)
    assert found["tokens"]["position"] == 0
    assert found["tokens"]["text"]["b"].startswith("You are")


def test_a_stored_run_is_shown_without_its_tokenizer():
    with reading(STORED) as reader:
        assert "is not on this machine" in str(reader.text())
        assert sent(reader, "api/run")["run"]["tokenizer"] == reader.text()
        for row in sent(reader, "api/sessions")["sessions"]:
            for node in sent(reader, f"api/sessions/{row['session_id']}")["calls"]:
                found = sent(reader, f"api/sessions/{row['session_id']}/calls/{node['call_id']}")
                assert (found["prompt_pieces"], found["call"]["call_id"]) == (None, node["call_id"])


def test_a_few_sessions_are_read_as_if_the_run_had_no_others(written):
    with reading(written[0], only=["s"]) as reader:
        assert [row["session_id"] for row in sent(reader, "api/sessions")["sessions"]] == ["s"]
        with pytest.raises(UnknownError):
            answer(reader, "api/sessions/other")
