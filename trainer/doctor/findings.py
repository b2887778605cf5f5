"""Facts of a run -> what they mean and what to set. Each rule is a pure function of `Observed`."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rolltap.addons.store.records import Event
from rolltap.trainer.doctor.conversation import is_ending
from rolltap.trainer.doctor.node import fetch_uses_proxy
from rolltap.trainer.doctor.observed import Observed, wrote_reply
from rolltap.trainer.rollouts.facts import DISTRUST, failed_tls

Level = Literal["problem", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to know.

    Attributes:
        level: `problem`: calls were not captured or not continued. `note`: all else.
        text: What was seen.
        advice: What to set or to do; empty when there is nothing.
    """

    level: Level
    text: str
    advice: str = ""


def findings(seen: Observed) -> list[Finding]:
    """Return what is to be known of a run, problems first."""
    found = [finding for rule in RULES for finding in rule(seen)]
    return sorted(found, key=lambda finding: finding.level != "problem")


def no_call(seen: Observed) -> Iterator[Finding]:
    """No model call was answered, and nothing says why: the program did not use the proxy, or asked no model."""
    if _answered(seen):
        return
    if seen.of("uncaptured", "rejected", "fault", "unauthorised") or _tls_failures(seen) or seen.calls:
        yield Finding("problem", "No model call was answered.", "See the other problems.")
        return
    directly = ""
    if seen.loopback:
        directly = (
            f" It is told of an address on loopback: {', '.join(seen.loopback)}. Programs reach loopback directly, not "
            "through the recorder: if this is its model, unset it, or give a host that does not exist, such as "
            "http://model.rolltap/v1. The recorder answers model calls to every host."
        )
    if seen.node and not fetch_uses_proxy(seen.node):
        yield Finding(
            "problem",
            f"No model call came. The program runs in Node {seen.node}, whose own fetch does not use HTTPS_PROXY.",
            "Run it with Node 22.21, 24.5 or newer, which follow NODE_USE_ENV_PROXY=1. rolltap sets it." + directly,
        )
        return
    lacks = "say that it lacks a key, an argument or a login? A placeholder key is enough"
    yield Finding(
        "problem",
        "No model call came. The program asked no model, or it did not use the proxy.",
        (f"Does the output below {lacks}. " if seen.output.strip() else "It printed nothing. ")
        + "If it does ask one, its HTTP client ignores HTTPS_PROXY, or the user name and password in it: with aiohttp "
        "it needs trust_env=True, with Java -Dhttps.proxyHost and -Dhttps.proxyPort, with Node NODE_USE_ENV_PROXY=1 "
        "and 22.21 or newer. `rolltap env` prints what is set." + directly,
    )


def uncaptured(seen: Observed) -> Iterator[Finding]:
    """Model calls that no API of the recorder answers."""
    for text, count in _counted(f"{_place(event)} ({event.detail})" for event in seen.of("uncaptured")):
        yield Finding(
            "problem",
            f"{_times(count)} not captured: {text}. It looks like a model call, and no API of the recorder has this "
            "path.",
            next(advice for pattern, advice in UNCAPTURED if re.search(pattern, text)),
        )


UNCAPTURED = [
    ("did you mean", "Correct the path, or the base URL, in the program's settings."),
    ("set rolltap_prefix=", "An API behind a gateway: give the option with --set rolltap_prefix=/PREFIX."),
    (
        "",
        "Choose another API in the program: OpenAI's Chat Completions or Responses, Anthropic's Messages, Gemini's "
        "generateContent. Is it one of them behind a gateway of your own? --set rolltap_prefix=/my/gateway names "
        "what its paths begin with.",
    ),
]
"""(pattern of a request and its event, advice). The first match decides."""


def untrusted(seen: Observed) -> Iterator[Finding]:
    """TLS that failed: the program does not trust the recorder's certificate, or pins another."""
    for place, count in _counted(f"{event.host}: {event.detail}" for event in _tls_failures(seen)):
        yield Finding(
            "note" if _answered(seen) else "problem",
            f"{_times(count)} TLS failed. {place}",
            DISTRUST,
        )


def unauthorised(seen: Observed) -> Iterator[Finding]:
    """Requests with other credentials than the session's."""
    if events := seen.of("unauthorised"):
        yield Finding(
            "problem" if not seen.calls else "note",
            f"{_times(len(events))} the program came to the proxy with another user name and password than its URL's.",
            "Its HTTP client must take them from HTTPS_PROXY (http://USER:PASSWORD@HOST:PORT).",
        )


def rejected(seen: Observed) -> Iterator[Finding]:
    """Requests to a known API that ask for what the recorder does not do, or that failed."""
    for text, count in _counted(f"{_place(event)}: {event.detail}" for event in seen.of("rejected", "fault", "budget")):
        yield Finding(
            "problem",
            f"{_times(count)} refused. {text}",
            "The text names what was asked. Switch it off in the program's settings, or choose another of its APIs.",
        )


def broken(seen: Observed) -> Iterator[Finding]:
    """Calls that did not complete, or whose tokens break an invariant."""
    for call in seen.calls:
        if call.status != "completed" or call.violation:
            why = call.violation or call.error or "the program hung up"
            yield Finding("problem", f"A call to {call.host}{call.path} was {call.status}: {why}.")


def not_continued(seen: Observed) -> Iterator[Finding]:
    """Calls that were rendered anew: the program changed its own history."""
    for reason, count in _counted(call.kind_reason or "" for call in seen.calls if call.kind == "rendered"):
        advice = next(advice for pattern, advice in RENDERED if re.search(pattern, reason))
        yield Finding("problem", f"{_times(count)} not continued: {reason}.", advice)


RENDERED = [
    ("fit equally well", "The program asked the same question several times, and the replies were alike."),
    (
        "its tools are not those",
        "The program offers other tools than before. Load them all at its start: no tool search, no late MCP server.",
    ),
    (
        "",
        "The program rewrote its history there. Look for a setting that shortens, summarises or refreshes it, or that "
        "writes the time into it. Such a call begins a trace of its own; its tokens stay exact.",
    ),
]
"""(pattern of a call's `kind_reason`, advice). The first match decides."""


def rewritten(seen: Observed) -> Iterator[Finding]:
    """Calls that continue an earlier call than the last: the program wrote the replies since then itself."""
    if written := [call for call in seen.calls if wrote_reply(call)]:
        yield Finding(
            "problem",
            f"{_times(len(written))} not continued: the prompt has an assistant message that no model wrote.",
            "The program changes replies before it sends them again, or makes up turns of the model. They are context "
            "then, and are not trained. Look for a setting that cleans, shortens or merges replies.",
        )


def unanswered(seen: Observed) -> Iterator[Finding]:
    """Calls of a tool after which no call came. A call that is not continued may answer any: it has its own finding."""
    followed = {call.parent_id for call in seen.calls}
    if any(call.kind == "rendered" or wrote_reply(call) for call in seen.calls):
        return
    for call in seen.calls:
        if call.call_id in followed or call.role not in ("agent", "subagent"):
            continue
        made = [tool["function"] for tool in (call.parsed_reply or {}).get("tool_calls") or []]
        if names := [tool["name"] for tool in made if not is_ending(tool["name"], tool["arguments"])]:
            yield Finding(
                "problem",
                f"The call of {' and '.join(names)} was not answered: no call came with its result.",
                "The program ended after the tool call, or went on in another conversation." + _see_output(seen),
            )


def untrained(seen: Observed) -> Iterator[Finding]:
    """Calls, and none of the agent: nothing would be trained."""
    if seen.calls and not any(call.role in ("agent", "subagent") for call in seen.calls):
        roles = ", ".join(sorted({f"{call.role} ({call.role_evidence})" for call in seen.calls}))
        yield Finding("problem", f"No call is the agent's, so none is trained: {roles}.")


def short(seen: Observed) -> Iterator[Finding]:
    """Calls, none of which has a history: that they would be continued was not seen."""
    if not seen.calls or any(call.kind != "root" for call in seen.calls) or any(unanswered(seen)):
        return
    if tools := sorted({_tool_name(tool) for call in seen.calls for tool in call.parsed_tools or []}):
        text = f"It was offered {len(tools)} tools, and none of them was called: {', '.join(tools)}."
        advice = (
            "Only a shell is called, or a tool whose name begins with a word such as read, list, get or search. Try "
            "with one that only looks."
        )
    else:
        text, advice = "It offers the model no tools.", "Its calls were captured; nothing was there to continue."
    yield Finding("note", f"No call continues another. {text}", advice)


def ended(seen: Observed) -> Iterator[Finding]:
    """An end of the program that is not status 0. It is no problem when its calls were continued before."""
    if seen.stopped is not None:
        yield Finding(
            "problem",
            f"The program did not end within {seen.timeout:g} s ({seen.stopped}).",
            "Does it wait for a person? Give it the arguments with which it works on one instruction and exits. "
            "--timeout gives it more time.",
        )
    elif seen.exit_status:
        yield Finding(
            "note" if seen.continued or not seen.calls else "problem",
            f"The program ended with status {seen.exit_status}.",
            _see_output(seen).strip(),
        )


def moved(seen: Observed) -> Iterator[Finding]:
    """A version that the preset was not tested with."""
    if seen.version and seen.tested_version and seen.version != seen.tested_version:
        yield Finding(
            "note",
            f"The program has the version {seen.version}; its preset was tested with {seen.tested_version}.",
            f"{seen.install} installs that one. Without problems here the preset fits this version too.",
        )


def hidden(seen: Observed) -> Iterator[Finding]:
    """Images that the model was not shown."""
    if events := seen.of("hidden"):
        calls = "1 call" if len(events) == 1 else f"{len(events)} calls"
        yield Finding("note", f"In {calls} images became texts which say that they are not shown.")


def refused(seen: Observed) -> Iterator[Finding]:
    """Requests to hosts that sessions do not reach."""
    events = [event for event in seen.of("refused") if event not in _tls_failures(seen)]
    if hosts := sorted({event.host for event in events if event.host}):
        yield Finding(
            "note",
            f"{_times(len(events))} another request was refused: {', '.join(hosts)}.",
            "Most programs work without them. Allow a host that the task needs: --set rolltap_allow=HOST.",
        )


RULES: Sequence[Callable[[Observed], Iterator[Finding]]] = (
    no_call,
    uncaptured,
    untrusted,
    unauthorised,
    rejected,
    broken,
    not_continued,
    rewritten,
    unanswered,
    untrained,
    ended,
    short,
    moved,
    hidden,
    refused,
)


def _tls_failures(seen: Observed) -> list[Event]:
    return [event for event in seen.events if failed_tls(event.kind, event.detail)]


def _answered(seen: Observed) -> bool:
    return any(call.status == "completed" for call in seen.calls)


def _see_output(seen: Observed) -> str:
    return " The last lines of its output are below." if seen.output.strip() else ""


def _place(event: Event) -> str:
    return f"{event.method} {event.host}{event.path}"


def _tool_name(tool: dict[str, object]) -> str:
    function = tool.get("function")
    return str((function if isinstance(function, dict) else tool).get("name"))


def _counted(texts: Iterator[str]) -> list[tuple[str, int]]:
    return Counter(texts).most_common()


def _times(count: int) -> str:
    return "Once" if count == 1 else f"{count} times"
