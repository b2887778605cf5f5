"""The facts of one run of a program -> what they mean and what to set. Each rule is a pure function
of `Observed`."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rolltap.addons.store.records import WEBSOCKET, Call, Event
from rolltap.addons.store.rows import printable
from rolltap.trainer.doctor.scripted_model import is_ending
from rolltap.trainer.names import counted
from rolltap.trainer.traces.facts import DISTRUST, failed_tls, on_loopback


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One run of a program under the recorder.

    Attributes:
        program: The program as it was given, or the name of its preset.
        exit_status: Minus the signal's number when a signal ended it; None when it was stopped.
        stopped: Why it was stopped after `timeout` seconds, or None when it ended by itself.
        output: The last lines of its stdout and stderr.
        calls: Its model calls in the order in which they started.
        events: Facts of the wire that are no calls, in the order in which they were recorded.
        version: Version that the program of a preset reports, or "". The preset was tested with
            `tested_version`, which the command `install` installs.
        quirks: Facts of the preset.
        tool: The tool that the model was to call, or None for one that does no harm.
        places: Texts that may name the address of the program's model, by where they stand.
    """

    program: str
    exit_status: int | None = 0
    stopped: str | None = None
    timeout: float = 0.0
    output: str = ""
    calls: Sequence[Call] = ()
    events: Sequence[Event] = ()
    version: str = ""
    tested_version: str = ""
    install: str = ""
    quirks: Sequence[str] = ()
    tool: str | None = None
    places: Mapping[str, str] = field(default_factory=dict)

    def of(self, *kinds: str) -> list[Event]:
        """Return the events of some kinds."""
        return [event for event in self.events if event.kind in kinds]

    @property
    def tls_failures(self) -> list[Event]:
        """The events of connections whose TLS failed."""
        return [event for event in self.events if failed_tls(event.kind, event.detail)]

    @property
    def asked_nothing(self) -> bool:
        """True when no model call came, and no request that may have been meant as one."""
        meant = self.of("uncaptured", "rejected", "fault", "unauthorised")
        return not (self.calls or self.tls_failures or meant)

    @property
    def answered(self) -> bool:
        """True when at least one model call was answered in full."""
        return any(call.status == "completed" for call in self.calls)

    @property
    def continued(self) -> list[Call]:
        """The calls that continue the call before them token for token."""
        return [call for call in self.calls if call.kind == "bridged" and not wrote_reply(call)]

    @property
    def tools_tried(self) -> bool:
        """True when a tool's result came back, or when no call offers a tool."""
        for call in self.calls:
            if call.kind != "root" and _has_message(call, "tool"):
                return True
        return not any(map(offered, self.calls))


def wrote_reply(call: Call) -> bool:
    """Return True when a call has an assistant message, after the reply that it continues, that no
    model wrote.

    The program wrote it in the place of a reply, so that the call continues an earlier one than the
    last.
    """
    return call.kind == "bridged" and _has_message(call, "assistant")


def _has_message(call: Call, role: str) -> bool:
    return any(message.get("role") == role for message in call.parsed_messages)


Level = Literal["problem", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to know.

    Attributes:
        level: `problem`: calls were not captured or not continued. `note`: all else.
        text: The fact.
        advice: The setting or the action that remedies it; empty when there is none.
    """

    level: Level
    text: str
    advice: str = ""


def findings(seen: Observed) -> list[Finding]:
    """Return what is to be known of a run, problems first."""
    found: list[Finding] = []
    for rule in (_no_call, _refused, _interrupted, _history, _end):
        found += rule(seen)
    return sorted(found, key=lambda finding: finding.level != "problem")


_PROXY = (
    "If the program does ask a model, it sets NO_PROXY, or its HTTP client ignores HTTPS_PROXY or "
    "the user name and password in it. aiohttp needs trust_env=True, Java needs -Dhttps.proxyHost "
    "and -Dhttps.proxyPort, and Node's own fetch uses the proxy with Node 22.21, 24.5 or newer. Or "
    "the program asks a model on loopback, which programs reach directly: give any other host, "
    "such as http://model.rolltap/v1. The recorder answers model calls to every host. `rolltap "
    "env` prints what is set."
)
_CANNOT_CONNECT = (
    "If the program could not connect, it does not use the proxy: it sets NO_PROXY, or its HTTP "
    "client ignores HTTPS_PROXY, as aiohttp without trust_env=True and Node before 22.21 do."
)
_UNCAPTURED = (
    "Correct the path or the base URL in the program's settings, or choose another API in the "
    "program: OpenAI's Chat Completions or Responses, Anthropic's Messages, Gemini's "
    "generateContent."
)
_SAME_QUESTION = "The program asked the same question several times, and the replies were alike."
_OTHER_TOOLS = (
    "The program offers other tools than before. Let it load all tools at its start, without a "
    "tool search and without an MCP server that is added later. A step that reflects on results "
    "and offers no tools can often be switched off."
)
_REWRITTEN = (
    "The program rewrote its history there. Look for a setting that shortens, summarises or "
    "refreshes it, or that writes the time into it. Such a call begins a trace of its own; its "
    "tokens stay exact."
)
_OWN_FORMAT = re.compile(r"\[\[ ## \w+ ## \]\]|Action Input:")
"""Marks in the prompts of programs that read a text format of their own: DSPy, agents after
ReAct."""


def _no_call(seen: Observed) -> Iterator[Finding]:
    """No model call was answered.

    Says why unless another rule does: the program failed, or passed by the proxy.
    """
    if seen.answered:
        return
    if not seen.asked_nothing:
        yield Finding("problem", "No model call was answered.", "See the other problems.")
        return
    why = "The program asked no model, or it did not use the proxy."
    hints = _PROXY
    if seen.exit_status:
        why = ""
        hints = _CANNOT_CONNECT
    if others := sorted({_request(event) for event in seen.of("refused") if event.method}):
        why = f"Only other requests came through the proxy: {', '.join(others)}."
        hints = _PROXY
    if asked_past := on_loopback({**seen.places, "its output": seen.output}):
        why = f"{why} {asked_past}.".strip()
        hints = _PROXY
    text = f"No model call came. {why}".strip()
    lacks = "It printed nothing."
    last = seen.output.strip().rpartition("\n")[2].rstrip(".")
    ended = _ended(seen)
    if last:
        ended += f": {printable(last)}"
        lacks = "Does the output below say that it lacks a key, an argument or a login?"
        lacks += " A placeholder key is enough."
    if seen.exit_status:
        text = f"{ended}. {text}"
    yield Finding("problem", text, f"{lacks} {hints}")


def _refused(seen: Observed) -> Iterator[Finding]:
    """Requests that were refused, and images that were hidden."""
    uncaptured = Counter(f"{_request(event)} ({event.detail})" for event in seen.of("uncaptured"))
    for text, count in uncaptured.most_common():
        what = "It looks like a model call, but no API of the recorder has this path."
        yield Finding(
            "problem", f"{_were(count, 'request')} not captured: {text}. {what}", _UNCAPTURED
        )
    failures = Counter(f"{event.host}: {event.detail}" for event in seen.tls_failures)
    for text, count in failures.most_common():
        level: Level = "note" if seen.answered else "problem"
        yield Finding(level, f"{counted(count, 'connection')} failed. {text}", DISTRUST)
    if events := seen.of("unauthorised"):
        yield Finding(
            "note" if seen.calls else "problem",
            "The program gave the proxy another user name and password, in "
            f"{counted(len(events), 'request')}.",
            "Its HTTP client must take them from HTTPS_PROXY: http://USER:PASSWORD@HOST:PORT.",
        )
    events = seen.of("rejected", "fault", "budget")
    refused = Counter(f"{_request(event)}: {event.detail}" for event in events)
    for text, count in refused.most_common():
        yield Finding(
            "problem",
            f"{_were(count, 'request')} refused. {text}",
            "Switch off in the program what the message names, or choose another API.",
        )
    if events := seen.of("hidden"):
        calls = counted(len(events), "call")
        what = "images were replaced by a text, because the model cannot see them."
        yield Finding("note", f"In {calls} {what}")
    yield from _refused_others(seen)


def _refused_others(seen: Observed) -> Iterator[Finding]:
    """Requests to other hosts, which are no model calls."""
    hosts: list[str] = []
    for event in seen.of("refused"):
        if event.host and event not in seen.tls_failures and event.detail != WEBSOCKET:
            hosts.append(event.host)
    if hosts:
        named = ", ".join(sorted(set(hosts)))
        yield Finding(
            "note",
            f"{_were(len(hosts), 'other request')} refused: {named}.",
            "Most programs work without it. If the task needs a host, allow it: --set "
            "rolltap_allow=HOST.",
        )


def _interrupted(seen: Observed) -> Iterator[Finding]:
    """Calls that did not complete, or whose tokens break an invariant, and calls of tools without a
    result."""
    for call in seen.calls:
        if call.status != "completed" or call.violation:
            why = call.error or call.violation or "the program hung up"
            text = f"A call to {call.host}{call.path} was {call.status}: {why}."
            yield Finding("problem", text)
    if cut := _cut(seen):
        what = "the token limit of the program cut the scripted reply: its tools were not tried."
        yield Finding(
            "problem",
            f"In {counted(len(cut), 'call')} {what}",
            "Give the program a larger limit for this trial, such as max_tokens = 1000.",
        )
    for call in _unanswered(seen):
        tools = " and ".join(_tools_called(call))
        why = "The program ended after the tool call, or went on in another conversation."
        yield Finding(
            "problem",
            f"The call of {tools} was not answered: no call came with its result.",
            f"{why} {_see_output(seen)}".strip(),
        )


def _history(seen: Observed) -> Iterator[Finding]:
    """Calls that are not continued, or not trained."""
    rendered = Counter(call.kind_reason or "" for call in seen.calls if call.kind == "rendered")
    for reason, count in rendered.most_common():
        advice = _REWRITTEN
        if "fit equally well" in reason:
            advice = _SAME_QUESTION
        elif "its tools are not those" in reason:
            advice = _OTHER_TOOLS
        yield Finding("problem", f"{_were(count, 'call')} not continued: {reason}.", advice)
    if written := [call for call in seen.calls if wrote_reply(call)]:
        what = "the prompt has an assistant message that no model wrote."
        yield Finding(
            "problem",
            f"{_were(len(written), 'call')} not continued: {what}",
            "The program changes replies before it sends them again, or makes up turns of the "
            "model. They are context then, and are not trained. Look for a setting that cleans, "
            "shortens or merges replies.",
        )
    if seen.calls and not any(map(_is_agents, seen.calls)):
        roles = sorted({f"{call.role} ({call.role_evidence})" for call in seen.calls})
        text = f"No call is the agent's, so none is trained: {', '.join(roles)}."
        yield Finding("problem", text)
    if seen.calls:
        yield from _tools(seen)


def _tools(seen: Observed) -> Iterator[Finding]:
    """Tools whose results did not come back."""
    tools: set[str] = set()
    called: set[str] = set()
    for call in seen.calls:
        tools.update(offered(call))
        called.update(_tools_called(call))
    names = ", ".join(sorted(tools))
    if seen.tool and seen.tool not in tools:
        text = f"The program never offered a tool {seen.tool}. It offers {names or 'none'}."
        advice = "Name one of these with --tool." if names else ""
        yield Finding("problem", text, advice)
        return
    untried = all(call.kind == "root" for call in seen.calls)
    if (seen.tools_tried and not untried) or _unanswered(seen) or _cut(seen):
        return
    text = "The program offers the model no tools."
    advice = "Its calls were captured; nothing was there to continue."
    if called:
        text = f"The model called {' and '.join(sorted(called))}, and no tool's result came back."
        advice = "Does the program accept the arguments? Name another tool: --tool NAME."
    elif tools:
        text = f"The model was offered {counted(len(tools), 'tool')} and called none: {names}."
        advice = (
            "Only a shell is called, or a tool whose name begins with a word such as read, list, "
            "get or search. Name one that only looks: --tool NAME."
        )
    if untried:
        text = f"No call continues another. {text}"
    yield Finding("note", text, advice)


def _end(seen: Observed) -> Iterator[Finding]:
    """An end of the program that is not status 0, and a version that the preset was not tested
    with."""
    if seen.stopped is not None:
        yield Finding(
            "problem",
            f"The program did not end within {seen.timeout:g} s ({seen.stopped}).",
            "Does it wait for a person? Give it the arguments with which it works on one "
            "instruction and exits. --timeout gives it more time.",
        )
    elif seen.exit_status and not seen.asked_nothing:
        text = f"{_ended(seen)}."
        own = _OWN_FORMAT.search("".join(call.messages for call in seen.calls if not offered(call)))
        if own:
            text += f" It wants replies in a text format of its own ({own[0]}): the scripted model"
            text += " has none."
        level: Level = "problem"
        if seen.continued or not seen.calls or own:
            level = "note"
        yield Finding(level, text, _see_output(seen))
    if seen.version and seen.tested_version and seen.version != seen.tested_version:
        tested = seen.tested_version
        yield Finding(
            "note",
            f"The program has the version {seen.version}; its preset was tested with {tested}.",
            f"{seen.install} installs that version. If no problem was found, yours works too.",
        )


def _cut(seen: Observed) -> list[Call]:
    return [call for call in seen.calls if call.finish_reason == "length"]


def _unanswered(seen: Observed) -> list[Call]:
    """Return the agent's calls after whose tool calls no call came.

    A call that is not continued may answer any of them, and has its own finding.
    """
    if any(call.kind == "rendered" or wrote_reply(call) for call in seen.calls):
        return []
    followed = {call.parent_id for call in seen.calls}
    unanswered: list[Call] = []
    for call in seen.calls:
        if call.call_id not in followed and _is_agents(call) and _tools_called(call):
            unanswered.append(call)
    return unanswered


def _is_agents(call: Call) -> bool:
    return call.role in ("agent", "subagent")


def _tools_called(call: Call) -> list[str]:
    """Return the names of the tools that a reply calls, without one with which a program ends."""
    reply = call.parsed_reply or {}
    names: list[str] = []
    for made in reply.get("tool_calls") or []:
        tool = made["function"]
        if not is_ending(tool["name"], tool["arguments"]):
            names.append(tool["name"])
    return names


def offered(call: Call) -> list[str]:
    """Return the names of the tools that a call offers."""
    names: list[str] = []
    for tool in call.parsed_tools or []:
        described = tool.get("function") or tool
        names.append(str(described.get("name")))
    return names


def _ended(seen: Observed) -> str:
    return f"The program ended with status {seen.exit_status}"


def _see_output(seen: Observed) -> str:
    return "The last lines of its output are below." if seen.output.strip() else ""


def _request(event: Event) -> str:
    return f"{event.method} {event.host}{event.path}"


def _were(count: int, what: str) -> str:
    verb = "were"
    if count == 1:
        verb = "was"
    return f"{counted(count, what)} {verb}"
