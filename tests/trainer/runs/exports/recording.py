"""Hand-made sessions as a recorder would leave them, with consistent tokens, messages and roles."""

import json
from functools import wraps

from rolltap.trainer.traces.reader import RecordedSession
from tests.factories import make_call, make_session, write_run

SYSTEM = {"role": "system", "content": "You are an agent."}
BASH = {
    "type": "function",
    "function": {"name": "bash", "description": "Run", "parameters": {"type": "object"}},
}


def user(text):
    return {"role": "user", "content": text}


def tool(number, text):
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": text}


def says(text, *, reasoning=None, calls=None):
    """Return an assistant message. `calls` maps the number of a tool call to the JSON text of its
    arguments."""
    message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = []
    for number, arguments in (calls or {}).items():
        function = {"name": "bash", "arguments": arguments}
        called = {"id": f"call_{number}", "type": "function", "function": function}
        message["tool_calls"].append(called)
    return message


class Recording:
    """Builder of one session's calls. By default every call samples two tokens, different from
    those of other calls."""

    def __init__(self, session_id="s", reward=1.0):
        self.session_id = session_id
        self.calls = []
        labels = {"task_id": "task", "group_id": "group", "harness": "pi", "policy_version": None}
        self.session = make_session(session_id, reward=reward, **labels)

    def ask(self, *messages, after=None, retry_of=None, tools=(BASH,), **fields):
        """Add and return a call whose new messages are `messages`.

        It continues the call `after`, if given, and has the prompt of `retry_of`.
        """
        number = len(self.calls)
        new_ids = [*(10 + len(str(message)) for message in messages), 100 + number]
        if retry_of:
            new_ids = retry_of.prompt_ids[retry_of.prefix_length :]
        defaults = {
            "session_id": self.session_id,
            "call_id": f"c{number}",
            "logprobs": [-0.25 - number] * 2,
            "finish_reason": "stop",
            "model": "asked-for",
            "messages": json.dumps(messages),
            "reply": says(f"reply {number}"),
        }
        if fields.get("status") == "aborted":
            defaults |= {"finish_reason": None, "reply": None}
        if after is None:
            defaults["tools"] = json.dumps(list(tools))
        fields = {**defaults, **fields}
        if fields["reply"]:
            fields["reply"] = json.dumps(fields["reply"])
        call = make_call(number, new_ids, [1000 + number, 2000 + number], after=after, **fields)
        self.calls.append(call)
        return call

    def recorded(self):
        return RecordedSession(session_id=self.session_id, session=self.session, calls=self.calls)


CASES = []
"""Functions that return a session: all that follow."""


def case(fill):
    """Make a function that adds calls to a recording one that returns the recording, and add it to
    `CASES`."""

    @wraps(fill)
    def made():
        recording = Recording()
        fill(recording)
        return recording

    CASES.append(made)
    return made


@case
def turns_with_tools(recording):
    first = recording.ask(
        SYSTEM,
        user("List."),
        reply=says("", reasoning="I look.", calls={1: '{"command": "ls"}'}),
        cached_tokens=1,
    )
    recording.ask(tool(1, "a.txt"), reply=says("a.txt"), after=first)


@case
def side_question(recording):
    first = recording.ask(SYSTEM, user("Go."))
    recording.ask(user("Title?"), tools=(), role="auxiliary")
    recording.ask(user("More."), after=first)


@case
def unrewarded(recording):
    recording.ask(user("Go."))
    recording.ask(user("Title?"), tools=(), role="auxiliary")
    recording.session.reward = None


@case
def subagent(recording):
    """A session with a sub-agent of two turns between those of the agent."""
    first = recording.ask(SYSTEM, user("Go."), reply=says("", calls={1: '{"task": "look"}'}))
    helper = recording.ask(user("Look."), role="subagent")
    recording.ask(user("Look more."), after=helper, role="subagent")
    recording.ask(tool(1, "seen"), after=first)


@case
def late_subagent(recording):
    """A session with a sub-agent that continues after the agent's last call."""
    first = recording.ask(SYSTEM, user("Go."))
    helper = recording.ask(user("Look."), role="subagent")
    recording.ask(user("More."), after=first)
    recording.ask(user("Look more."), after=helper, role="subagent")


@case
def taken_back(recording):
    """A session whose harness replaced its second message by another one."""
    first = recording.ask(SYSTEM, user("Go."))
    recording.ask(user("Left."), after=first)
    right = recording.ask(user("Right, please."), after=first)
    recording.ask(user("On."), after=right)


@case
def two_conversations(recording):
    first = recording.ask(SYSTEM, user("Go."))
    beside = recording.ask(user("A helper that nothing tells from the agent."))
    second = recording.ask(user("More."), after=first)
    recording.ask(user("Helper's second."), after=beside)
    recording.ask(user("On."), after=second)


@case
def compaction(recording):
    """A conversation that a compaction call continues. The agent then starts from its summary."""
    first = recording.ask(SYSTEM, user("Go."))
    second = recording.ask(user("More."), after=first)
    recording.ask(user("Sum up."), reply=says("We went."), after=second, role="compaction")
    resumed = recording.ask(SYSTEM, user("So far: We went."), kind_reason="rewritten")
    recording.ask(user("On."), after=resumed)


@case
def superseded_retry(recording):
    """A session whose second request was retried. One reply was lost, the other one is
    continued."""
    first = recording.ask(SYSTEM, user("Go."))
    lost = recording.ask(user("More."), after=first)
    again = recording.ask(user("More."), after=first, retry_of=lost)
    recording.ask(user("On."), after=again)


@case
def superseded_start(recording):
    lost = recording.ask(SYSTEM, user("Go."))
    again = recording.ask(SYSTEM, user("Go."), retry_of=lost)
    recording.ask(user("On."), after=again)


@case
def unasked_result(recording):
    first = recording.ask(user("Go."), reply=says("", calls={1: "{}"}))
    recording.ask(tool(9, "stray"), after=first)


@case
def aborted(recording):
    first = recording.ask(SYSTEM, user("Go."))
    recording.ask(
        user("More."), after=first, status="aborted", error="the harness closed the connection"
    )


@case
def superseded_by_an_aborted_line(recording):
    """A session whose second request was retried. One of the replies was continued by an aborted
    call."""
    first = recording.ask(SYSTEM, user("Go."))
    lost = recording.ask(user("More."), after=first)
    again = recording.ask(user("More."), after=first, retry_of=lost)
    recording.ask(user("On."), after=again, status="aborted")


@case
def broken_logprobs(recording):
    first = recording.ask(
        SYSTEM, user("Go."), logprobs=[float("nan"), -1.0], violation="log-probability 0 is nan"
    )
    recording.ask(user("More."), after=first)


@case
def positive_logprob(recording):
    recording.ask(
        user("Go."), logprobs=[-1.0, 0.5], violation="log-probability 1 is positive (0.5)"
    )


@case
def without_logprobs(recording):
    recording.ask(user("Go."), logprobs=[])


@case
def missing_ancestor(recording):
    """A session whose first call is lost. Only the new tokens of the second call are known."""
    first = recording.ask(SYSTEM, user("Go."))
    second = recording.ask(user("More."), after=first)
    second.violation = "parent c0 is not in the run"
    second.prompt_ids = second.prompt_ids[-2:]
    second.prefix_length = 0
    recording.calls = [second]


@case
def only_side_questions(recording):
    recording.ask(user("Title?"), tools=(), role="auxiliary")


@case
def malformed_arguments(recording):
    first = recording.ask(user("Go."), reply=says("", calls={1: '{"command": ls'}))
    recording.ask(tool(1, "invalid JSON"), after=first)


def write(run, *recordings, **metadata):
    """Write the recordings to a run folder."""
    rows = []
    for recording in recordings:
        rows += [*recording.calls, recording.session]
    return write_run(run, *rows, **metadata)
