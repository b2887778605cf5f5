import json
import logging

import pytest

from rolltap.trainer.runs.exports.atif import export, trajectory
from rolltap.trainer.runs.exports.sessions import dump_json
from tests.trainer.runs.exports import recording
from tests.trainer.runs.exports.atif_schema import Trajectory
from tests.trainer.runs.exports.recording import CASES, SYSTEM, Recording, says, tool, user, write


def written(made):
    """Return the session's trajectory as it is written to a file."""
    return json.loads(dump_json(trajectory(made.recorded(), "tiny")))


def shown(document):
    """Return the steps in short form: the call id of an agent step, in parentheses for a copy; otherwise the text."""
    steps = []
    for step in document["steps"]:
        name = step["extra"]["call_id"] if step["source"] == "agent" else f"{step['source']}: {step['message']}"
        steps.append(f"({name})" if step.get("is_copied_context") else name)
    return steps


def embedded(document):
    return {sub["trajectory_id"]: sub for sub in document.get("subagent_trajectories", [])}


def references(step):
    results = step.get("observation", {}).get("results", [])
    return [ref["trajectory_id"] for result in results for ref in result.get("subagent_trajectory_ref", [])]


class TestTrajectory:
    @pytest.mark.parametrize("case", CASES)
    def test_it_follows_the_schema(self, case):
        Trajectory.model_validate(written(case()))

    @pytest.mark.parametrize("case", CASES)
    def test_every_call_is_one_step_that_is_not_a_copy(self, case):
        made = case()
        document = written(made)
        trajectories = [document, *embedded(document).values()]
        steps = [step for one in trajectories for step in one["steps"] if "metrics" in step]
        assert sorted(step["extra"]["call_id"] for step in steps) == [call.call_id for call in made.calls]
        for step in steps:
            call = next(call for call in made.calls if call.call_id == step["extra"]["call_id"])
            assert step["metrics"]["prompt_token_ids"] == call.prompt_ids
            assert step["metrics"]["completion_token_ids"] == call.completion_ids

    def test_a_turn_with_a_tool_is_a_step_with_its_result(self):
        document = written(recording.turns_with_tools())
        assert shown(document) == ["system: You are an agent.", "user: List.", "c0", "c1"]
        step = document["steps"][2]
        assert (step["message"], step["reasoning_content"], step["llm_call_count"]) == ("", "I look.", 1)
        assert step["tool_calls"] == [
            {"tool_call_id": "call_1", "function_name": "bash", "arguments": {"command": "ls"}}
        ]
        assert step["observation"] == {"results": [{"source_call_id": "call_1", "content": "a.txt"}]}
        assert step["metrics"]["logprobs"] == [-0.25, -0.25]
        assert step["metrics"]["cached_tokens"] == 1
        assert step["metrics"]["extra"] == {"weight_versions": [{"version": "1", "start": 0, "end": 2}]}
        assert step["extra"]["requested_model"] == "asked-for"

    def test_the_session_is_in_the_agent_and_in_extra(self):
        document = written(recording.turns_with_tools())
        assert document["agent"] == {
            "name": "pi",
            "version": "unknown",
            "model_name": "tiny",
            "tool_definitions": [recording.BASH],
        }
        assert (document["session_id"], document["extra"]["reward"], document["extra"]["task_id"]) == ("s", 1.0, "task")
        assert document["final_metrics"]["total_completion_tokens"] == 4

    def test_versions_parts_and_evidence_are_in_it_and_no_path_of_this_machine(self):
        made = recording.turns_with_tools()
        made.session.harness_version, made.session.parts = "1.2.3", '{"speed": 0.5}'
        made.session.evidence = '{"changed": ["src/a.py"], "log": "/home/me/runs/s.log"}'
        made.session.error = "stopped: the output is in /home/me/runs/s.log"
        document = written(made)
        assert document["agent"]["version"] == "1.2.3"
        assert document["extra"]["parts"] == {"speed": 0.5}
        assert document["extra"]["evidence"] == {"changed": ["src/a.py"], "log": "…/s.log"}
        assert "/home" not in json.dumps(document)

    def test_a_side_question_is_embedded_where_it_was_asked(self):
        document = written(recording.side_question())
        assert shown(document)[2:] == ["c0", "user: More.", "c2"]
        assert references(document["steps"][2]) == ["c1"]
        title = embedded(document)["c1"]
        assert shown(title) == ["user: Title?", "c1"]
        assert title["extra"]["role"] == "auxiliary"
        assert title["steps"][1]["extra"]["left_out"] == "auxiliary"

    def test_a_subagent_is_embedded_beside_the_tools_result(self):
        document = written(recording.subagent())
        assert shown(document)[2:] == ["c0", "c3"]
        assert references(document["steps"][2]) == ["c2"]
        assert document["steps"][2]["observation"]["results"][0] == {"source_call_id": "call_1", "content": "seen"}
        assert shown(embedded(document)["c2"]) == ["user: Look.", "c1", "user: Look more.", "c2"]

    def test_after_a_compaction_the_trajectory_is_the_new_conversation_and_the_old_one_is_embedded(self):
        document = written(recording.compaction())
        assert shown(document) == [
            "system: You are an agent.",
            "user: So far: We went.",
            "c3",
            "user: On.",
            "c4",
        ]
        before, summary = embedded(document).values()
        assert (before["trajectory_id"], before["extra"]["role"]) == ("c1", "agent")
        assert shown(before)[2:] == ["c0", "user: More.", "c1"]
        assert (summary["trajectory_id"], summary["extra"]["role"]) == ("c2", "compaction")
        assert shown(summary)[2:] == ["(c0)", "(user: More.)", "(c1)", "user: Sum up.", "c2"]
        assert "metrics" not in summary["steps"][2]

    def test_a_lost_reply_is_embedded_as_superseded(self):
        document = written(recording.superseded_retry())
        assert shown(document)[2:] == ["c0", "user: More.", "c2", "user: On.", "c3"]
        lost = embedded(document)["c1"]
        assert shown(lost)[2:] == ["(c0)", "user: More.", "c1"]
        assert lost["steps"][-1]["extra"]["left_out"] == "superseded"

    def test_a_first_request_that_was_repeated_is_embedded(self):
        document = written(recording.superseded_start())
        assert shown(document)[2:] == ["c1", "user: On.", "c2"]
        assert list(embedded(document)) == ["c0"]

    def test_the_trajectory_is_the_branch_of_the_last_call(self):
        document = written(recording.taken_back())
        assert shown(document)[2:] == ["c0", "user: Right, please.", "c2", "user: On.", "c3"]
        assert shown(embedded(document)["c1"])[2:] == ["(c0)", "user: Left.", "c1"]

    def test_a_result_without_a_tool_call_has_its_id_in_extra(self):
        step = written(recording.unasked_result())["steps"][1]
        assert step["observation"]["results"] == [{"content": "stray", "extra": {"tool_call_id": "call_9"}}]

    def test_a_session_of_side_questions_alone_shows_the_last(self):
        document = written(recording.only_side_questions())
        assert shown(document) == ["user: Title?", "c0"]

    def test_a_call_without_a_reply_says_why(self):
        document = written(recording.aborted())
        assert shown(document)[2:] == ["c0", "user: More.", "c1"]
        step = document["steps"][-1]
        assert (step["message"], step["extra"]["status"]) == ("", "aborted")
        assert step["extra"]["error"] == "the harness closed the connection"

    def test_logprobs_that_are_not_finite_are_named(self):
        step = written(recording.broken_logprobs())["steps"][2]
        assert "logprobs" not in step["metrics"]
        assert step["metrics"]["extra"]["logprobs"] == ["NaN", -1.0]

    def test_arguments_that_are_no_object_are_kept_as_text(self):
        step = written(recording.malformed_arguments())["steps"][1]
        (tool_call,) = step["tool_calls"]
        assert (tool_call["arguments"], tool_call["extra"]) == ({}, {"arguments": '{"command": ls'})

    def test_a_conversation_whose_beginning_is_lost_says_so(self):
        document = written(recording.missing_ancestor())
        assert shown(document) == ["user: More.", "c1"]
        assert document["steps"][1]["extra"]["incomplete"] == "its parent c0 is not in the run"

    def test_messages_from_before_the_session_are_copied_context(self):
        made = Recording()
        made.ask(user("Go."), says("", calls={7: "{}"}), tool(7, "old"), user("Again."))
        steps = written(made)["steps"]
        assert [step.get("is_copied_context") for step in steps] == [None, True, None, None]
        assert steps[1]["observation"]["results"] == [{"source_call_id": "call_7", "content": "old"}]

    def test_a_conversation_beside_that_of_the_last_call_is_embedded(self):
        made = Recording()
        first = made.ask(SYSTEM, user("Go."))
        beside = made.ask(user("A helper that nothing tells from the agent."))
        second = made.ask(user("More."), after=first)
        made.ask(user("Helper's second."), after=beside)
        made.ask(user("On."), after=second)
        document = written(made)
        assert shown(document)[2:] == ["c0", "user: More.", "c2", "user: On.", "c4"]
        assert list(embedded(document)) == ["c3"]

    def test_a_step_with_other_tools_has_them(self):
        made = Recording()
        first = made.ask(user("Go."))
        made.ask(user("Again."), after=first).tools = "[]"
        steps = written(made)["steps"]
        assert "tools" not in steps[1]["extra"]
        assert steps[3]["extra"]["tools"] == []


class TestExport:
    def test_each_session_with_calls_has_a_file(self, tmp_path, caplog):
        run = write(tmp_path / "run", recording.turns_with_tools(), Recording("empty"))
        (out := tmp_path / "out").mkdir()
        done = []
        with caplog.at_level(logging.WARNING):
            assert export(run, out, lambda _, *at: done.append(at)) == 1
        assert done == [(1, 2), (2, 2)]
        assert "1 sessions are left out: they have no calls" in caplog.text
        (file,) = out.iterdir()
        assert json.loads(file.read_text()) == written(recording.turns_with_tools())

    def test_a_model_in_a_local_folder_has_the_name_of_the_folder(self, tmp_path):
        run = write(tmp_path / "run", recording.turns_with_tools())
        metadata = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps(metadata | {"model": "/home/me/models/qwen3-4b"}))
        (out := tmp_path / "out").mkdir()
        export(run, out, lambda *_: None)
        [file] = out.iterdir()
        assert json.loads(file.read_text())["agent"]["model_name"] == "qwen3-4b"
        assert "/home/me" not in file.read_text()


def test_harbors_own_validator_accepts_the_trajectories():
    validator = pytest.importorskip("harbor.utils.trajectory_validator", reason="harbor needs Python 3.12")
    for case in CASES:
        checked = validator.TrajectoryValidator()
        assert checked.validate(written(case())), checked.get_errors()
