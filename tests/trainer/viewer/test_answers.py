import json
import os
import shutil
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

import pytest

from rolltap.addons.errors import RunError
from rolltap.addons.store.records import Event, json_text
from rolltap.addons.store.tables import RunWriter, run_files
from rolltap.trainer.runs.views.report import summarize
from rolltap.trainer.viewer.answers import answer
from rolltap.trainer.viewer.reader import RunReader
from tests.factories import START, add_rows, make_call, make_session, write_run
from tests.trainer.viewer.runs import add_trained, read_all, reading, trained, write

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


def row_of(reader, session_id):
    """Return the row of a session in the answer that lists them."""
    for row in sent(reader, "api/sessions")["sessions"]:
        if row["session_id"] == session_id:
            return row


class TestRun:
    def test_it_is_the_summary_that_inspect_prints_and_its_groups(self, reader, written):
        found = sent(reader, "api/run")
        summary = json.loads(json_text(summarize(written[0]).to_json()))
        del summary["session_rows"]
        assert found["summary"] == summary
        assert found["read"] == {"sessions": 3, "of": 3}
        assert found["run"]["path"] == str(written[0])
        assert found["run"]["name"] == "run"
        assert found["run"]["tokenizer"] is None
        assert found["run"]["recording"] is False
        assert found["groups"][0] == {
            "group_id": "g",
            "task_id": "t",
            "sessions": ["other", "s"],
            "rewards": [0.0, 1.0],
            "signal": True,
        }
        assert found["faults"] == []
        assert found["training"] is None

    def test_rewards_are_there_before_any_call_is_read(self, written):
        reader = RunReader(written[0])
        assert reader.overview().progress == {"sessions": 0, "of": 2}
        summary = sent(reader, "api/run")["summary"]
        assert summary["outcomes"][0]["mean_reward"] == 0.5
        assert summary["calls"] == {}
        assert row_of(reader, "s")["calls"] is None

    def test_one_that_grows_is_followed_also_while_it_is_compacted(self, tmp_path):
        run = write_run(tmp_path / "run", make_call(0), make_call(0, session_id="a"))
        with reading(run) as reader, RunWriter(run) as writer:
            before = reader.version
            assert sent(reader, "api/sessions/s")["session"] is None
            writer.add_call(make_call(1, [2, 5]))
            writer.add_session(make_session(reward=0.5))
            assert sent(reader, "api/run")["run"]["recording"]
            assert sent(reader, "api/sessions/s")["session"]["reward"] == 0.5
            read_all(reader)
            assert reader.changes(before) == ["s"]
            assert row_of(reader, "s")["calls"] == 2
            assert row_of(reader, "s")["reward"] == 0.5
            before = reader.version
            writer.close()
            read_all(reader)
            assert len(sent(reader, "api/sessions/s")["calls"]) == 2
            assert reader.version == before
            assert not sent(reader, "api/run")["run"]["recording"]

    def test_an_empty_one_is_shown_and_a_folder_that_is_none_says_so(self, tmp_path):
        with reading(write_run(tmp_path / "empty")) as reader:
            assert sent(reader, "api/run")["read"] == {"sessions": 0, "of": 0}
            assert sent(reader, "api/sessions") == {"sessions": []}
        with pytest.raises(RunError, match="is not a run folder"):
            answer(RunReader(tmp_path), "api/run")

    def test_of_a_damaged_one_the_rest_is_shown_and_the_damage_named(self, tmp_path):
        rows = [make_call(0), make_call(0, session_id="a"), make_session(), make_session("a")]
        run = write_run(tmp_path / "run", *rows)
        (calls,) = run_files(run, "calls")
        data = bytearray(calls.read_bytes())
        data[-3000:-2900] = os.urandom(100)
        calls.write_bytes(data)
        shutil.copy(calls, run / "calls-copy.arrow")
        with reading(run) as reader:
            found = sent(reader, "api/run")
            assert found["read"] == {"sessions": 2, "of": 2}
            assert any(calls.name in fault or "twice" in fault for fault in found["faults"])
            assert len(sent(reader, "api/sessions")["sessions"]) == 2

    def test_metrics_of_a_training_are_shown_and_damaged_ones_are_a_fault(self, tmp_path):
        run = write_run(tmp_path / "run", make_call(0))
        metrics = run / "metrics.jsonl"
        with reading(run) as reader:
            metrics.write_text('{"step": 1, "loss": 0.5}\n{"step": 2}\n{"ste')
            steps = [{"step": 1, "loss": 0.5}, {"step": 2}]
            assert sent(reader, "api/run")["training"] == {"metrics": steps, "steps": []}
            metrics.write_text("nonsense\n")
            found = sent(reader, "api/run")
            assert found["training"] is None
            assert "line 1 is not a step's metrics" in found["faults"][0]

    def test_a_stored_one_is_shown_without_its_tokenizer(self):
        with reading(STORED) as reader:
            assert "is not on this machine" in str(reader.text())
            assert sent(reader, "api/run")["run"]["tokenizer"] == reader.text()
            for row in sent(reader, "api/sessions")["sessions"]:
                session = f"api/sessions/{row['session_id']}"
                for node in sent(reader, session)["calls"]:
                    found = sent(reader, f"{session}/calls/{node['call_id']}")
                    assert found["prompt_pieces"] is None
                    assert found["call"]["call_id"] == node["call_id"]


class TestSession:
    def test_it_has_its_row_and_counts_in_the_order_of_the_starts(self, reader):
        rows = sent(reader, "api/sessions")["sessions"]
        assert [row["session_id"] for row in rows] == ["other", "s", "a/b c"]
        row = rows[1]
        assert row["reward"] == 1.0
        assert row["status"] == "completed"
        assert row["read"]
        assert row["calls"] == 4
        assert row["kinds"] == {"root": 2, "bridged": 1, "rendered": 1}
        assert row["faults"] == row["retries"] == 1
        assert row["sampled"] == row["trained"] + sum(row["left_out"].values())
        without = rows[2]
        assert without["status"] == "unknown"
        assert without["reward"] is None
        assert without["group_id"] == "a/b c"
        assert without["sampled"] == 2
        assert without["trained"] == 0

    def test_it_has_its_conversations_its_events_and_its_group(self, reader):
        found = sent(reader, "api/sessions/s")
        lanes = {lane["name"]: lane["calls"] for lane in found["lanes"]}
        assert lanes == {"main": ["0", "1", "3"], "side questions": ["2"]}
        first, second, *_ = found["calls"]
        assert first["messages"] == [{"role": "user", "content": "Count the lines"}]
        assert second["parent_id"] == "0"
        assert second["reply"]["content"] == "There are 3."
        events = [(event["kind"], event["call_id"]) for event in found["events"]]
        assert events == [("fault", "1"), ("replayed", "1")]
        rewards = {member["session_id"]: member["reward"] for member in found["group"]}
        assert rewards == {"other": 0.0, "s": 1.0}
        assert found["judge"] is found["patch"] is found["log"] is None

    def test_its_events_are_in_the_order_of_their_times(self, tmp_path):
        late = Event(kind="fault", session_id="s", at=START + timedelta(seconds=2))
        early = Event(kind="joined", session_id="s", at=START)
        run = write_run(tmp_path, make_call("a", [1]), late, early, make_session("s"))
        with reading(run) as reader:
            found = sent(reader, "api/sessions/s")
        assert [event["kind"] for event in found["events"]] == ["joined", "fault"]

    def test_texts_that_attack_a_page_stay_data(self, tmp_path):
        evil = '</script><script>alert(1)</script>\u2028"\\\x00'
        call = make_call(0, reply=json.dumps({"role": "assistant", "content": evil}), model=evil)
        run = write_run(tmp_path / "run", call, make_session(error=evil, task_id=evil))
        with reading(run) as reader:
            found = sent(reader, "api/sessions/s")
            assert found["calls"][0]["reply"]["content"] == evil
            assert found["session"]["error"] == evil

    def test_it_has_the_ends_of_its_logs_and_that_of_its_last_judge(self, tmp_path):
        run = write_run(tmp_path / "run", make_call(0), make_session())
        logs = run / "logs"
        logs.mkdir()
        (logs / "s.judge.log").write_text("the first")
        (logs / "s.r0.judge.log").write_text("the last")
        (logs / "s.log").write_text("x" * 300_000 + "the end")
        (logs / "s.diff").write_text("+ a line")
        with reading(run) as reader:
            found = sent(reader, "api/sessions/s")
        assert found["judge"] == "the last"
        assert found["patch"] == "+ a line"
        note, _, end = found["log"].partition("\n")
        assert note == "[262,144 of 300,007 bytes; the whole is in logs/s.log]"
        assert end.endswith("xthe end")

    def test_one_of_another_machine_cannot_name_a_file_outside_of_the_logs(self, tmp_path):
        calls = [make_call(0, session_id="../secret"), make_call(0, session_id="link")]
        run = write_run(tmp_path / "run", *calls)
        (run / "logs").mkdir()
        (run / "secret.log").write_text("private")
        (run / "logs" / "link.log").symlink_to(run / "secret.log")
        with reading(run) as reader:
            assert sent(reader, f"api/sessions/{quote('../secret', safe='')}")["log"] is None
            assert sent(reader, "api/sessions/link")["log"] is None

    def test_one_of_which_a_reward_is_changed_is_read_again(self, tmp_path):
        run = write_run(tmp_path / "run", make_call(0), make_session(reward=0.0))
        with reading(run) as reader:
            add_rows(run, make_session(reward=1.0, revision=1))
            read_all(reader)
            assert sent(reader, "api/run")["groups"][0]["rewards"] == [1.0]
            revisions = sent(reader, "api/sessions/s")["revisions"]
            assert [row["reward"] for row in revisions] == [0.0, 1.0]

    def test_one_whose_rows_no_recorder_wrote_is_named_and_the_others_are_read(self, tmp_path):
        strange = make_call(0, session_id="strange", reply='{"tool_calls": [7]}', messages="{")
        rows = [strange, make_session("strange"), make_call(0), make_session()]
        with reading(write_run(tmp_path / "run", *rows)) as reader:
            assert sent(reader, "api/run")["read"] == {"sessions": 2, "of": 2}
            assert row_of(reader, "s")["calls"] == 1


class TestCall:
    def test_it_has_its_tokens_their_text_and_who_sampled_them(self, reader, written):
        first, second, *_ = written[1]
        found = sent(reader, "api/sessions/s/calls/1")
        assert found["call"]["prompt_ids"] == list(second.prompt_ids)
        assert found["call"]["logprobs"] == second.logprobs
        start = len(first.prompt_ids)
        end = start + len(first.completion_ids)
        assert found["sampled"] == [{"call_id": "0", "start": start, "end": end}]
        pieces = found["prompt_pieces"]
        text = "".join(piece[0] for piece in pieces)
        assert text == "You are an agent. café 🙂I look.<|im_end|>three files"
        assert sum(piece[1] for piece in pieces) == len(second.prompt_ids)
        assert found["completion_pieces"][-1] == ["<|im_end|>", 1, "special"]
        assert found["previous"] == found["parent_id"] == "0"
        assert found["next"] == "2"
        assert found["excluded"] == []
        side = sent(reader, "api/sessions/s/calls/2")
        every = len(side["call"]["completion_ids"])
        assert side["excluded"] == [{"start": 0, "end": every, "reason": "auxiliary"}]

    def test_pieces_end_where_sampled_tokens_begin_though_a_character_does_not(
        self, tmp_path, tokenizer, tokenizer_folder
    ):
        face = tokenizer("🙂", add_special_tokens=False)["input_ids"]
        first = make_call(0, face[:1], face[1:])
        second = make_call(1, [1], [2], after=first)
        run = write_run(
            tmp_path / "run", first, second, make_session(), model=str(tokenizer_folder)
        )
        with reading(run) as reader:
            assert sent(reader, "api/sessions/s/calls/1")["prompt_pieces"][0][1] == 1

    def test_where_a_rendered_prompt_differs_is_shown_as_text(self, reader):
        found = sent(reader, "api/sessions/s/calls/3")
        assert found["difference"]["call_id"] in ("0", "1")
        text = found["difference_text"]
        assert text["common"].endswith(("caf", " "))
        assert text["recorded"] != text["rendered"]

    def test_what_a_step_trained_is_shown_of_the_run_the_session_and_the_call(self, tmp_path):
        first = make_call(0, [1], [2, 3, 4])
        second = make_call(1, [5], [6, 7], after=first)
        run = write_run(tmp_path / "run", first, second, make_session())
        add_trained(run, trained([first, second], step=1, advantage=0.5))
        with reading(run) as reader:
            left_out = {"over_length": 2}
            counts = {"step": 1, "sessions": 1, "sampled": 5, "trained": 3, "left_out": left_out}
            assert sent(reader, "api/run")["training"]["steps"] == [counts]
            assert row_of(reader, "s")["advantage"] == 0.5
            session = sent(reader, "api/sessions/s")
            assert session["group"][0]["advantage"] == 0.5
            [step] = session["trained"]
            assert step["trained"] == 3
            assert step["left_out"] == left_out
            call = sent(reader, "api/sessions/s/calls/0")
            [part] = call["trained"]
            assert part["start"] == 0
            assert part["end"] == 2
            assert part["differences"] == [0.2, 0.0]
            assert part["weights"] == [0.5, 0.5]
            assert call["excluded"] == [{"start": 2, "end": 3, "reason": "over_length"}]


def test_text_is_found_with_the_words_around_it_whatever_its_capitals(reader):
    assert sent(reader, "api/search?q=count%20THE") == {
        "sessions": [{"session_id": "s", "call_id": "0", "text": "Count the lines"}],
        "cut": False,
    }
    assert sent(reader, "api/search?q=%22")["sessions"] != []  # in the arguments of a tool call
