import json
import logging

import pytest

from rolltap.addons.store.records import json_text
from rolltap.trainer.runs.exports.atif import export, trajectory
from tests.trainer.runs.exports import recording
from tests.trainer.runs.exports.atif_schema import Trajectory
from tests.trainer.runs.exports.recording import CASES, Recording, says, tool, user, write


def written(made, model="tiny"):
    """Return the session's trajectory as it is written to a file."""
    return json.loads(json_text(trajectory(made.recorded(), model)))


def shown(document):
    """Return the steps in short form: the call id of an agent step, in parentheses for a copy;
    otherwise the text."""
    steps = []
    for step in document["steps"]:
        name = f"{step['source']}: {step['message']}"
        if step["source"] == "agent":
            name = step["extra"]["call_id"]
        if step.get("is_copied_context"):
            name = f"({name})"
        steps.append(name)
    return steps


def after_opening(document):
    """Return the steps after the first messages in one line."""
    opening = ("system: You are an agent.", "user: Go.")
    steps = [step for step in shown(document) if step.strip("()") not in opening]
    return " | ".join(steps).replace("user: ", "")


def embedded(document):
    return {sub["trajectory_id"]: sub for sub in document.get("subagent_trajectories", [])}


def references(step):
    found = []
    for result in step["observation"]["results"]:
        for reference in result.get("subagent_trajectory_ref", []):
            found.append(reference["trajectory_id"])
    return found


class TestTrajectory:
    @pytest.mark.parametrize("case", CASES)
    def test_it_follows_the_schema_and_every_call_is_one_step_that_is_not_a_copy(self, case):
        made = case()
        document = written(made)
        Trajectory.model_validate(document)
        found = {}
        for each in (document, *embedded(document).values()):
            for step in each["steps"]:
                if "metrics" in step:
                    call_id = step["extra"]["call_id"]
                    assert call_id not in found
                    found[call_id] = step["metrics"]
        assert set(found) == {call.call_id for call in made.calls}
        for call in made.calls:
            assert found[call.call_id]["prompt_token_ids"] == call.prompt_ids
            assert found[call.call_id]["completion_token_ids"] == call.completion_ids

    @pytest.mark.parametrize(
        ("case", "main", "others"),
        [
            (recording.superseded_start, "c1 | On. | c2", {"c0": "c0"}),
            (recording.superseded_retry, "c0 | More. | c2 | On. | c3", {"c1": "(c0) | More. | c1"}),
            (
                recording.taken_back,
                "c0 | Right, please. | c2 | On. | c3",
                {"c1": "(c0) | Left. | c1"},
            ),
            (
                recording.two_conversations,
                "c0 | More. | c2 | On. | c4",
                {"c3": "A helper that nothing tells from the agent. | c1 | Helper's second. | c3"},
            ),
            (recording.side_question, "c0 | More. | c2", {"c1": "Title? | c1"}),
            (recording.subagent, "c0 | c3", {"c2": "Look. | c1 | Look more. | c2"}),
            (
                recording.compaction,
                "So far: We went. | c3 | On. | c4",
                {"c1": "c0 | More. | c1", "c2": "(c0) | (More.) | (c1) | Sum up. | c2"},
            ),
            (recording.aborted, "c0 | More. | c1", {}),
            (recording.only_side_questions, "Title? | c0", {}),
            (recording.missing_ancestor, "More. | c1", {}),
        ],
    )
    def test_the_line_of_the_last_call_is_the_trajectory_and_the_others_are_embedded(
        self, case, main, others
    ):
        document = written(case())
        assert after_opening(document) == main
        assert {name: after_opening(line) for name, line in embedded(document).items()} == others

    def test_a_turn_with_a_tool_is_a_step_with_its_result_and_the_session_is_in_agent_and_extra(
        self,
    ):
        document = written(recording.turns_with_tools())
        assert shown(document) == ["system: You are an agent.", "user: List.", "c0", "c1"]
        step = document["steps"][2]
        assert step["message"] == ""
        assert step["reasoning_content"] == "I look."
        assert step["llm_call_count"] == 1
        [tool_call] = step["tool_calls"]
        assert tool_call["tool_call_id"] == "call_1"
        assert tool_call["function_name"] == "bash"
        assert tool_call["arguments"] == {"command": "ls"}
        result = {"source_call_id": "call_1", "content": "a.txt"}
        assert step["observation"] == {"results": [result]}
        metrics = step["metrics"]
        assert metrics["logprobs"] == [-0.25, -0.25]
        assert metrics["cached_tokens"] == 1
        versions = [{"version": "1", "start": 0, "end": 2}]
        assert metrics["extra"] == {"weight_versions": versions}
        assert step["extra"]["requested_model"] == "asked-for"
        assert document["agent"] == {
            "name": "pi",
            "version": "unknown",
            "model_name": "tiny",
            "tool_definitions": [recording.BASH],
        }
        assert document["session_id"] == "s"
        assert document["extra"]["reward"] == 1.0
        assert document["extra"]["task_id"] == "task"
        assert document["final_metrics"]["total_completion_tokens"] == 4

    def test_versions_parts_and_evidence_are_in_it_and_no_path_of_this_machine(self):
        made = recording.turns_with_tools()
        made.session.harness_version = "1.2.3"
        made.session.parts = {"speed": 0.5}
        made.session.evidence = {"changed": ["src/a.py"], "log": "/home/me/runs/s.log"}
        made.session.error = "stopped: the output is in /home/me/runs/s.log"
        document = written(made)
        assert document["agent"]["version"] == "1.2.3"
        assert document["extra"]["parts"] == {"speed": 0.5}
        assert document["extra"]["evidence"] == {"changed": ["src/a.py"], "log": "…/s.log"}
        assert "/home" not in json.dumps(document)

    def test_a_side_question_and_a_subagent_are_referred_to_where_they_began(self):
        document = written(recording.side_question())
        assert references(document["steps"][2]) == ["c1"]
        title = embedded(document)["c1"]
        assert title["extra"]["role"] == "auxiliary"
        assert title["steps"][1]["extra"]["left_out"] == "auxiliary"
        step = written(recording.subagent())["steps"][2]
        assert references(step) == ["c2"]
        assert step["observation"]["results"][0] == {"source_call_id": "call_1", "content": "seen"}

    def test_roles_copies_and_superseded_calls_are_named(self):
        before, summary = embedded(written(recording.compaction())).values()
        assert before["extra"]["role"] == "agent"
        assert summary["extra"]["role"] == "compaction"
        assert "metrics" not in summary["steps"][2]
        lost = embedded(written(recording.superseded_retry()))["c1"]
        assert lost["steps"][-1]["extra"]["left_out"] == "superseded"
        assert written(recording.unrewarded())["steps"][-1]["extra"]["left_out"] == "no_reward"

    def test_what_a_step_has_no_place_for_is_in_its_extra(self):
        aborted = written(recording.aborted())["steps"][-1]
        assert aborted["message"] == ""
        assert aborted["extra"]["status"] == "aborted"
        assert aborted["extra"]["error"] == "the harness closed the connection"
        orphan = written(recording.missing_ancestor())["steps"][1]
        assert orphan["extra"]["incomplete"] == "its parent c0 is not in the run"
        metrics = written(recording.broken_logprobs())["steps"][2]["metrics"]
        assert "logprobs" not in metrics
        assert metrics["extra"]["logprobs"] == ["NaN", -1.0]
        (tool_call,) = written(recording.malformed_arguments())["steps"][1]["tool_calls"]
        assert tool_call["arguments"] == {}
        assert tool_call["extra"] == {"arguments": '{"command": ls'}
        result = {"content": "stray", "extra": {"tool_call_id": "call_9"}}
        assert written(recording.unasked_result())["steps"][1]["observation"]["results"] == [result]

    def test_messages_from_before_the_session_are_copied_context(self):
        made = Recording()
        made.ask(user("Go."), says("", calls={7: "{}"}), tool(7, "old"), user("Again."))
        steps = written(made)["steps"]
        assert [step.get("is_copied_context") for step in steps] == [None, True, None, None]
        assert steps[1]["observation"]["results"] == [
            {"source_call_id": "call_7", "content": "old"}
        ]

    def test_a_step_with_other_tools_has_them(self):
        made = Recording()
        first = made.ask(user("Go."))
        made.ask(user("Again."), after=first).tools = "[]"
        steps = written(made)["steps"]
        assert "tools" not in steps[1]["extra"]
        assert steps[3]["extra"]["tools"] == []


class TestExport:
    def test_each_session_with_calls_has_a_file_without_a_path_of_this_machine(
        self, tmp_path, caplog
    ):
        model = {"model": "/home/me/models/qwen3-4b"}  # has the name of its folder
        run = write(tmp_path / "run", recording.turns_with_tools(), Recording("empty"), **model)
        (out := tmp_path / "out").mkdir()
        done = []
        with caplog.at_level(logging.WARNING):
            assert export(run, out, lambda _, *at: done.append(at)) == 1
        assert done == [(1, 2), (2, 2)]
        assert "1 sessions are left out: they have no calls" in caplog.text
        (file,) = out.iterdir()
        assert json.loads(file.read_text()) == written(recording.turns_with_tools(), "qwen3-4b")


def test_harbors_own_validator_accepts_the_trajectories():
    validator = pytest.importorskip(
        "harbor.utils.trajectory_validator", reason="harbor needs Python 3.12"
    )
    for case in CASES:
        checked = validator.TrajectoryValidator()
        assert checked.validate(written(case())), checked.get_errors()
