"""The facts of one run of a program -> what they mean and what to set. Each rule is a pure function of `Observed`."""

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
        version: Version that the program of a preset reports, or "". The preset was tested with `tested_version`, which
            the command `install` installs.
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
        return not (self.calls or self.tls_failures or self.of("uncaptured", "rejected", "fault", "unauthorised"))

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
        later = (message for call in self.calls if call.kind != "root" for message in call.parsed_messages)
        return any(message.get("role") == "tool" for message in later) or not any(map(offered, self.calls))


def wrote_reply(call: Call) -> bool:
    """Return True when a call has an assistant message, after the reply that it continues, that no model wrote.

    The program wrote it in the place of a reply, so that the call continues an earlier one than the last.
    """
    return call.kind == "bridged" and any(message.get("role") == "assistant" for message in call.parsed_messages)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to know.

    Attributes:
        level: `problem`: calls were not captured or not continued. `note`: all else.
        text: The fact.
        advice: The setting or the action that remedies it; empty when there is none.
    """

    level: Literal["problem", "note"]
    text: str
    advice: str = ""


def findings(seen: Observed) -> list[Finding]:
    """Return what is to be known of a run, problems first."""
    found = [finding for rule in (_no_call, _refused, _interrupted, _history, _end) for finding in rule(seen)]
    return sorted(found, key=lambda finding: finding.level != "problem")


_PROXY = (
    "If it does ask one, it sets NO_PROXY, or its HTTP client ignores HTTPS_PROXY, or user name and password in it: "
    "aiohttp needs trust_env=True, Java -Dhttps.proxyHost and -Dhttps.proxyPort; Node's own fetch uses the proxy with "
    "Node 22.21, 24.5 or newer. Or it asks a model on loopback, which programs reach directly: give any other host, "
    "such as http://model.rolltap/v1. The recorder answers model calls to every host. `rolltap env` prints what is set."
)
_CANNOT_CONNECT = (
    "If it could not connect, it does not use the proxy: it sets NO_PROXY, or its HTTP client ignores HTTPS_PROXY, as "
    "aiohttp without trust_env=True and Node before 22.21 do."
)
_UNCAPTURED = (
    "Correct the path or the base URL in the program's settings, or choose another API in the program: OpenAI's "
    "Chat Completions or Responses, Anthropic's Messages, Gemini's generateContent."
)
_RENDERED = {
    "fit equally well": "The program asked the same question several times, and the replies were alike.",
    "its tools are not those": "The program offers other tools than before. Load them all at its start: no tool "
    "search, no late MCP server. A reflection on results that offers none can often be switched off.",
    "": "The program rewrote its history there. Look for a setting that shortens, summarises or refreshes it, or that "
    "writes the time into it. Such a call begins a trace of its own; its tokens stay exact.",
}
"""Part of a call's `kind_reason` -> advice. The first one counts."""
_OWN_FORMAT = re.compile(r"\[\[ ## \w+ ## \]\]|Action Input:")
"""Marks in the prompts of programs that read a text format of their own: DSPy, agents after ReAct."""


def _no_call(seen: Observed) -> Iterator[Finding]:
    """No model call was answered. Says why unless another rule does: the program failed, or passed by the proxy."""
    if seen.answered:
        return
    if not seen.asked_nothing:
        yield Finding("problem", "No model call was answered.", "See the other problems.")
        return
    lacks = "It printed nothing."
    last = seen.output.strip().rpartition("\n")[2].rstrip(".")
    if last:
        lacks = "Does the output below say that it lacks a key, an argument or a login? A placeholder key is enough."
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
    if seen.exit_status:
        ended = _ended(seen)
        if last:
            ended += f": {printable(last)}"
        text = f"{ended}. {text}"
    yield Finding("problem", text, f"{lacks} {hints}")


def _refused(seen: Observed) -> Iterator[Finding]:
    """Requests that were refused, and images that were hidden."""
    for text, count in Counter(f"{_request(event)} ({event.detail})" for event in seen.of("uncaptured")).most_common():
        what = "It looks like a model call, and no API of the recorder has this path."
        yield Finding("problem", f"{_times(count)} not captured: {text}. {what}", _UNCAPTURED)
    for text, count in Counter(f"{event.host}: {event.detail}" for event in seen.tls_failures).most_common():
        yield Finding("note" if seen.answered else "problem", f"{_times(count)} TLS failed. {text}", DISTRUST)
    if events := seen.of("unauthorised"):
        yield Finding(
            "note" if seen.calls else "problem",
            f"{_times(len(events))} the program sent the proxy another user name and password than those of its URL.",
            "Its HTTP client must take them from HTTPS_PROXY (http://USER:PASSWORD@HOST:PORT).",
        )
    refused = Counter(f"{_request(event)}: {event.detail}" for event in seen.of("rejected", "fault", "budget"))
    for text, count in refused.most_common():
        yield Finding(
            "problem",
            f"{_times(count)} refused. {text}",
            "The text names what was asked. Switch it off in the program's settings, or choose another of its APIs.",
        )
    if events := seen.of("hidden"):
        yield Finding(
            "note", f"In {counted(len(events), 'call')} images became texts which say that they are not shown."
        )
    events = [event for event in seen.of("refused") if event.host and event not in seen.tls_failures]
    events = [event for event in events if event.detail != WEBSOCKET]
    if events:
        yield Finding(
            "note",
            f"{_times(len(events))} another request was refused: {', '.join(sorted({e.host for e in events}))}.",
            "Most programs work without them. Allow a host that the task needs: --set rolltap_allow=HOST.",
        )


def _interrupted(seen: Observed) -> Iterator[Finding]:
    """Calls that did not complete, or whose tokens break an invariant, and calls of tools without a result."""
    for call in seen.calls:
        if call.status != "completed" or call.violation:
            why = call.error or call.violation or "the program hung up"
            yield Finding("problem", f"A call to {call.host}{call.path} was {call.status}: {why}.")
    if cut := _cut(seen):
        yield Finding(
            "problem",
            f"{_times(len(cut))} the token limit of the program cut the scripted reply: its tools were not tried.",
            "Give the program a larger limit for this trial, such as max_tokens = 1000.",
        )
    for call in _unanswered(seen):
        yield Finding(
            "problem",
            f"The call of {' and '.join(_tools_called(call))} was not answered: no call came with its result.",
            f"The program ended after the tool call, or went on in another conversation. {_see_output(seen)}".strip(),
        )


def _history(seen: Observed) -> Iterator[Finding]:
    """Calls that are not continued, or not trained."""
    rendered = Counter(call.kind_reason or "" for call in seen.calls if call.kind == "rendered")
    for reason, count in rendered.most_common():
        advice = next(advice for part, advice in _RENDERED.items() if part in reason)
        yield Finding("problem", f"{_times(count)} not continued: {reason}.", advice)
    if written := [call for call in seen.calls if wrote_reply(call)]:
        yield Finding(
            "problem",
            f"{_times(len(written))} not continued: the prompt has an assistant message that no model wrote.",
            "The program changes replies before it sends them again, or makes up turns of the model. They are context "
            "then, and are not trained. Look for a setting that cleans, shortens or merges replies.",
        )
    if seen.calls and not any(call.role in ("agent", "subagent") for call in seen.calls):
        roles = ", ".join(sorted({f"{call.role} ({call.role_evidence})" for call in seen.calls}))
        yield Finding("problem", f"No call is the agent's, so none is trained: {roles}.")
    tools = sorted({name for call in seen.calls for name in offered(call)})
    untried = all(call.kind == "root" for call in seen.calls)
    if seen.calls and seen.tool and seen.tool not in tools:
        yield Finding(
            "problem", f"The program never offered a tool {seen.tool}. It offers {', '.join(tools) or 'none'}."
        )
    elif seen.calls and (untried or not seen.tools_tried) and not _unanswered(seen) and not _cut(seen):
        text, advice = "It offers the model no tools.", "Its calls were captured; nothing was there to continue."
        if called := sorted({name for call in seen.calls for name in _tools_called(call)}):
            text = f"The model called {' and '.join(called)}, and no tool's result came back."
            advice = "Does the program accept the arguments? Name another tool: --tool NAME."
        elif tools:
            text = f"It was offered {len(tools)} tools, and none of them was called: {', '.join(tools)}."
            advice = (
                "Only a shell is called, or a tool whose name begins with a word such as read, list, get or search. "
                "Name one that only looks: --tool NAME."
            )
        yield Finding("note", f"{'No call continues another. ' * untried}{text}", advice)


def _end(seen: Observed) -> Iterator[Finding]:
    """An end of the program that is not status 0, and a version that the preset was not tested with."""
    if seen.stopped is not None:
        yield Finding(
            "problem",
            f"The program did not end within {seen.timeout:g} s ({seen.stopped}).",
            "Does it wait for a person? Give it the arguments with which it works on one instruction and exits. "
            "--timeout gives it more time.",
        )
    elif seen.exit_status and not seen.asked_nothing:
        own = _OWN_FORMAT.search("".join(call.messages for call in seen.calls if not offered(call)))
        wants = f" It wants replies in a text format of its own ({own[0]}): the scripted model has none." if own else ""
        level: Literal["problem", "note"] = "note" if seen.continued or not seen.calls or own else "problem"
        yield Finding(level, f"{_ended(seen)}.{wants}", _see_output(seen))
    if seen.version and seen.tested_version and seen.version != seen.tested_version:
        yield Finding(
            "note",
            f"The program has the version {seen.version}; its preset was tested with {seen.tested_version}.",
            f"{seen.install} installs that one. Without problems here the preset fits this version too.",
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
    last = [call for call in seen.calls if call.call_id not in followed and call.role in ("agent", "subagent")]
    return [call for call in last if _tools_called(call)]


def _tools_called(call: Call) -> list[str]:
    """Return the names of the tools that a reply calls, without one with which a program ends."""
    made = [made["function"] for made in (call.parsed_reply or {}).get("tool_calls") or []]
    return [tool["name"] for tool in made if not is_ending(tool["name"], tool["arguments"])]


def offered(call: Call) -> list[str]:
    """Return the names of the tools that a call offers."""
    return [str((tool.get("function") or tool).get("name")) for tool in call.parsed_tools or []]


def _ended(seen: Observed) -> str:
    return f"The program ended with status {seen.exit_status}"


def _see_output(seen: Observed) -> str:
    return "The last lines of its output are below." if seen.output.strip() else ""


def _request(event: Event) -> str:
    return f"{event.method} {event.host}{event.path}"


def _times(count: int) -> str:
    return "Once" if count == 1 else f"{count} times"
