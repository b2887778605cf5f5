"""Harbor's Agent Trajectory Interchange Format, ATIF v1.7 (Harbor's RFC 0001; its models, in harbor 0.25.0, allow no
other fields): one file per session.

A session's calls are lines: each is a branch of the tree of recorded parents, down to its last call of one role.

- The main line, of the agent's calls, is the trajectory: a step for each message and each call, tool results as
  observations of the step that asked for them. Where the harness began a new conversation, as after a compaction, a
  system step with `context_management` and the boundary `replace` has the messages that it began with as results.
- Every other line is an embedded trajectory under the id of its last call: sub-agents, compactions, side questions,
  superseded retries, calls that did not complete. `extra.role` says which. Steps that it shares with an earlier line
  are marked `is_copied_context` and have no metrics. The boundary step refers to the compactions before it; to all
  others refers the last agent step of the main line that started before them, as the wire does not tell which tool
  call started a sub-agent.
- What ATIF has no field for is `extra`: of a step the call's id, role, kind, status and why its tokens are not trained
  (`left_out`); of the metrics the weight versions; of the trajectory the session's row with its reward.

Not expressible: a session without calls, as a trajectory has at least one step (a warning counts them); where tool
results stood among user messages, as they belong to the step before; log-probabilities that are not finite, which are
`metrics.extra.logprobs` by their names. The harness's version is not recorded: `unknown`.
"""

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.records import Call
from rolltap.trainer.exports.atif_steps import Step, call_step, known, observe, replacing, result, said
from rolltap.trainer.exports.lines import Parents, find_ends, find_path, split_lines
from rolltap.trainer.exports.sessions import dump_json, each_session, session_file
from rolltap.trainer.progress import Advance
from rolltap.trainer.traces.build import judge_calls
from rolltap.trainer.traces.conversations import Message, Turn, rebuild_turns
from rolltap.trainer.traces.ledger import LeftOut
from rolltap.trainer.traces.reader import RecordedSession

logger = logging.getLogger(__name__)

VERSION = "ATIF-v1.7"
UNKNOWN = "unknown"


def export(run: Path, out: Path, advance: Advance) -> int:
    """Write a trajectory file per session that has calls; returns their number."""
    model = str(read_metadata(run).get("model", "")) or None
    written = empty = 0
    for recorded in each_session(run, advance):
        document = trajectory(recorded, model)
        if document is None:
            empty += 1
            continue
        (out / session_file(recorded.session_id)).write_text(dump_json(document) + "\n", encoding="utf-8")
        written += 1
    if empty:
        logger.warning("%s: %d sessions are left out, as they have no calls", run, empty)
    return written


def trajectory(recorded: RecordedSession, model: str | None = None) -> dict[str, Any] | None:
    """The trajectory of a session; None when it has no calls. `model` is the one that answered."""
    if not recorded.calls:
        return None
    tree = _Tree(recorded.calls)
    agent = {"name": recorded.session.harness if recorded.session else UNKNOWN, "version": UNKNOWN, "model_name": model}
    main = _main_line(tree)
    lines = list(split_lines(tree.parents, [*main, *tree.other_ends(main)]))
    steps = _Steps(tree)
    for n, (path, _) in enumerate(lines[: len(main)]):
        begun = n > 0 and bool(tree.turns[path[0]].new_messages)
        if begun:
            steps.add_boundary(path[0], after=main[n - 1])
        steps.add_calls(path, shared=0, begun=begun)
    embedded = []
    for path, shared in lines[len(main) :]:
        if shared < len(path):
            embedded.append(_embedded(tree, path, shared, agent))
            steps.refer(path, shared, embedded[-1])
    document = {
        **_document(recorded.session_id, agent, steps),
        "session_id": recorded.session_id,
        "extra": _session_extra(recorded),
    }
    return {**document, "subagent_trajectories": embedded} if embedded else document


class _Tree:
    """The calls of a session as a tree of recorded parents. All lists are in the order in which the calls started."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        self.turns: list[Turn] = rebuild_turns(calls)
        self.left_out: list[LeftOut | None] = judge_calls(calls)[1]
        index = {call.call_id: i for i, call in enumerate(calls)}
        self.parents: Parents = [index[turn.parent.call.call_id] if turn.parent else None for turn in self.turns]

    def other_ends(self, main: Sequence[int]) -> list[int]:
        """The last calls of all lines but the main one."""
        by_role: defaultdict[str, list[int]] = defaultdict(list)
        for i, call in enumerate(self.calls):
            by_role[call.role].append(i)
        ends = {end for calls in by_role.values() for end in find_ends(self.parents, calls)}
        return sorted(ends.difference(main))


def _main_line(tree: _Tree) -> list[int]:
    """The last calls of the conversations that follow one another from the agent's first on.

    Of several branches of a conversation it is the one that went on longest; a conversation that started before the
    one before it ended went on beside it, and is not the main line.
    """
    completed = [i for i, call in enumerate(tree.calls) if call.status == "completed"]
    agents = [i for i in completed if tree.calls[i].role == "agent" and tree.left_out[i] != "superseded"]
    ends = find_ends(tree.parents, agents or completed or range(len(tree.calls)))
    roots = {end: find_path(tree.parents, end)[0] for end in ends}
    main: list[int] = []
    while later := [end for end in ends if not main or roots[end] > main[-1]]:
        first = min(roots[end] for end in later)
        main.append(max(end for end in later if roots[end] == first))
    return main


@dataclass(slots=True)
class _Steps:
    """The steps of one trajectory as it grows."""

    tree: _Tree
    steps: list[Step] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    """Those of the first call; a step whose call had others has them in `extra`."""
    of_call: dict[int, Step] = field(default_factory=dict)
    """The steps of the calls that the trajectory owns."""
    boundaries: list[tuple[int, int, Step]] = field(default_factory=list)
    """The last call before a boundary, the first after it, and its step."""
    _asking: Step | None = None
    """The agent step that tool results belong to."""

    def add(self, step: Step) -> Step:
        self.steps.append({"step_id": len(self.steps) + 1, **step})
        return self.steps[-1]

    def add_calls(self, path: Sequence[int], *, shared: int, begun: bool = False) -> None:
        """Add the calls of a line, the first `shared` as copies; with `begun`, without the messages before them."""
        for n, i in enumerate(path):
            turn, copied = self.tree.turns[i], n < shared
            if not self.steps:
                self.tools = turn.tools
            for message in turn.new_messages if n or not begun else []:
                self._add_message(message, copied)
            step = self.add(call_step(turn, self.tree.left_out[i], copied))
            if turn.tools != self.tools and not copied:
                step["extra"]["tools"] = turn.tools
            self._asking = step
            if not copied:
                self.of_call[i] = step

    def _add_message(self, message: Message, copied: bool) -> None:
        mark = {"is_copied_context": True} if copied else {}
        if message["role"] == "tool":
            if self._asking is None:
                self._asking = self.add({"source": "system", "message": "", **mark})
            observe(self._asking, result(message, self._asking))
        elif message["role"] == "assistant":
            # no call of this session sampled it, so it comes from before
            self._asking = self.add({"source": "agent", **said(message), "is_copied_context": True})
        else:
            self.add({"source": message["role"], "message": message["content"], **mark})

    def add_boundary(self, root: int, *, after: int) -> None:
        """Say that the conversation of `root` replaces the one that ended with the call `after`."""
        turn = self.tree.turns[root]
        compacted = any(call.role == "compaction" for call in self.tree.calls[after:root])
        step = self.add(
            {
                "timestamp": turn.call.started_at.isoformat(),
                "source": "system",
                "message": "The harness began a new conversation.",
                "observation": {"results": [replacing(message) for message in turn.new_messages]},
                "extra": {
                    "context_management": {"type": "compaction" if compacted else "rewrite", "boundary": "replace"}
                },
            }
        )
        self.boundaries.append((after, root, step))

    def refer(self, path: Sequence[int], shared: int, embedded: dict[str, Any]) -> None:
        """Refer to an embedded trajectory where it started; nowhere when that was before the first agent step."""
        started, role = path[shared], embedded["extra"]["role"]
        step = next((s for a, b, s in self.boundaries if role == "compaction" and a < started < b), None)
        if step is None:
            step = self.of_call.get(max((i for i in self.of_call if i < started), default=-1))
        if step is not None:
            reference = {"trajectory_id": embedded["trajectory_id"], "extra": {"role": role}}
            observe(step, {"subagent_trajectory_ref": [reference]})


def _document(trajectory_id: str, agent: dict[str, Any], steps: _Steps) -> dict[str, Any]:
    calls = [steps.tree.calls[i] for i in steps.of_call]
    return {
        "schema_version": VERSION,
        "trajectory_id": trajectory_id,
        "agent": known({**agent, "tool_definitions": steps.tools}),
        "steps": steps.steps,
        "final_metrics": {
            "total_prompt_tokens": sum(len(call.prompt_ids) for call in calls),
            "total_completion_tokens": sum(len(call.completion_ids) for call in calls),
            "total_cached_tokens": sum(call.cached_tokens or 0 for call in calls),
            "total_steps": len(steps.steps),
        },
    }


def _embedded(tree: _Tree, path: Sequence[int], shared: int, agent: dict[str, Any]) -> dict[str, Any]:
    steps = _Steps(tree)
    steps.add_calls(path, shared=shared)
    last = tree.calls[path[-1]]
    return {**_document(last.call_id, agent, steps), "extra": {"role": last.role}}


def _session_extra(recorded: RecordedSession) -> dict[str, Any]:
    row = recorded.session.to_row() if recorded.session else {}
    row.pop("session_id", None)
    return known({name: value.isoformat() if isinstance(value, datetime) else value for name, value in row.items()})
