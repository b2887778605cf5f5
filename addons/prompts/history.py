"""The recorded conversations of a session, and which of its calls a request could continue.

`History.match` compares the messages of a request with the recorded conversations of its session
and finds candidates. `Conversations.prompt` decides: it renders all messages if several calls fit
equally well, or if the renderer cannot continue the call. The kinds of a match:

    bridged     they begin with a call's conversation and reply: the prompt is that call's prompt,
                its sampled tokens, and the tokens of the new messages
    rendered    one of them is a reply, changed or at another place: all messages are rendered
    root        none of them is a reply: all messages are rendered

Messages are compared in their canonical form (`canonical.py`); no text is tokenised again.
Reasoning is not compared, because some harnesses drop it. Reasoning, and the opaque field issued
with it (`call_id`), only decide between calls that are otherwise equal.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from weakref import WeakKeyDictionary

import numpy as np

from rolltap.addons.dialects.call import Message, ModelCall, Part
from rolltap.addons.prompts.canonical import (
    canonical,
    describe_difference,
    echoed_reasoning,
    extend_digest,
    first_digest,
    issued_forms,
    leading_system,
)
from rolltap.addons.store.records import CallKind

_EXCERPT = 400
"""Characters of each recorded message that are kept to show a difference."""
_RECENT = 8
"""Number of requests whose messages are not read again: agents and sub-agents alternate, and of
each the last two are needed, as the last one may be refused."""


@dataclass(slots=True, eq=False)
class Turn:
    """A recorded call as later calls continue it.

    Its prompt begins with the first `shared` tokens of the prompt and completion of `base`. Only
    the tokens after them are stored, so that memory grows linearly with a conversation, also when
    its calls are rendered.
    """

    call_id: str
    base: "Turn | None"
    """The parent of a continued call; of a rendered one, a call with many messages in common."""
    shared: int
    tail_ids: "array[int]"
    completion_ids: "array[int]"
    hashed: "hashlib.blake2b" = field(default_factory=partial(hashlib.blake2b, digest_size=16))
    """Hash of the ids of the prompt and the completion."""
    opening: bytes = b""
    """The `Prompt.opening`."""
    reasoning: str = ""
    node: "Prefix | None" = None
    """The conversation with the reply."""
    textless: bytes | None = None
    """Digest of the conversation and the reply without its text, if it has text beside calls."""

    @property
    def length(self) -> int:
        """The number of tokens of the prompt and the completion."""
        return self.shared + len(self.tail_ids) + len(self.completion_ids)

    def prompt_ids(self) -> "array[int]":
        """Return the full prompt of the call, in O(its length + number of turns below it)."""
        return self._ids(self.length - len(self.completion_ids))

    def store_after(self, base: "Turn") -> None:
        """Keep of a full prompt only the tokens after those that it shares with another call."""
        theirs = np.frombuffer(base._ids(len(self.tail_ids)), np.int32)
        ours = np.frombuffer(self.tail_ids, np.int32)[: len(theirs)]
        different = [*np.flatnonzero(ours != theirs)[:1], len(theirs)]
        self.base = base
        self.shared = int(different[0])
        self.tail_ids = self.tail_ids[self.shared :]

    def _ids(self, needed: int) -> "array[int]":
        """Return the first `needed` tokens of the prompt and the completion."""
        pieces: list[memoryview] = []
        turn: Turn | None = self
        while turn is not None:
            own = max(0, needed - turn.shared)
            sampled = max(0, own - len(turn.tail_ids))
            pieces.append(memoryview(turn.completion_ids)[:sampled])
            pieces.append(memoryview(turn.tail_ids)[:own])
            needed = min(needed, turn.shared)
            turn = turn.base
        joined = array("i")
        for piece in reversed(pieces):
            joined.frombytes(piece.cast("B"))
        return joined


@dataclass(slots=True, eq=False)
class Prefix:
    """The first messages of recorded conversations, or a conversation with its reply."""

    digest: bytes
    """Digest of the tools, the echo rule and all messages."""
    call_id: str = ""
    """The first call that had it. Empty for tools without messages."""
    excerpt: str = ""
    """The first `_EXCERPT` characters of its last message in the canonical form."""
    newest: "Prefix | None" = None
    """The prefix with the newest message that followed it."""
    asked: tuple[Turn, ...] = ()
    """The calls that were asked with it."""
    turns: tuple[Turn, ...] = ()
    """The calls whose reply is its last message."""
    changed: str | None = None
    """The call whose reply was its last message, changed by a request that was rendered."""

    @property
    def reply(self) -> "Prefix | None":
        """The newest reply to it."""
        return self.asked[-1].node if self.asked else None


@dataclass(slots=True)
class Conversation:
    """The messages of a request, or those after a recorded call."""

    model_call: ModelCall
    path: list[Prefix]
    """The recorded prefixes: `path[n]` has `messages[:n]` after all that is before them. The first
    one may have no messages, and is there even if it was not recorded."""

    @property
    def unread(self) -> list[Message]:
        """The messages after the path."""
        return self.model_call.messages[len(self.path) - 1 :]

    def digest(self) -> bytes:
        """Return the digest of all messages."""
        digest = self.path[-1].digest
        for message in self.unread:
            digest = extend_digest(digest, message, self.model_call)
        return digest


@dataclass(slots=True)
class RecentRequest:
    """A request whose messages are not read again."""

    messages: list[Message]
    """The messages after the leading system messages: the parts of the request have them too."""
    path: list[Prefix]
    """The recorded prefixes, from that of the leading system messages to the newest message, or to
    where a reply was recorded since."""


@dataclass(slots=True)
class Match:
    """The recorded calls that a conversation begins with, and the first reply after them."""

    turns: Sequence[Turn]
    """All calls with the longest conversation and reply that the messages begin with."""
    end: int
    """The number of messages of that conversation and reply. Those after them are new."""
    changed: int | None = None
    """Index of the first message after them that is a reply, changed or at another place."""
    call_id: str | None = None
    """The call of that reply; None when that may be one that cannot be read."""
    reason: str | None = None
    """Why no call is continued; None when `turns` are."""

    @property
    def kind(self) -> CallKind:
        """The kind of a call with these messages."""
        if self.reason is None:
            return "bridged"
        if self.turns or self.changed is not None:
            return "rendered"
        return "root"

    @property
    def sampled_by(self) -> str | None:
        """A call that sampled a reply among the messages."""
        for turn in self.turns:
            return turn.call_id
        return self.call_id

    def turn(self, echo: Message) -> Turn | None:
        """Return the call that issued the echoed reply. Calls of equal tokens are one.

        Returns None when that is ambiguous.
        """
        turns = self.turns
        if len(turns) > 1:
            reasoning = echoed_reasoning(echo)
            issued = [turn for turn in turns if turn.call_id == echo.get("call_id")]
            turns = issued[:1] or [turn for turn in turns if turn.reasoning == reasoning]
        distinct = {(turn.hashed.digest(), len(turn.completion_ids)) for turn in turns}
        return turns[0] if len(distinct) == 1 else None


class History:
    """The conversations and replies of one session, as a tree of prefixes. Not thread-safe.

    Holds token ids, digests and excerpts of messages: 4 bytes a token and about 1 KB a message.
    Messages are held only as long as somebody else holds the last part of their request:
    `RecentBodies`, within its bounds, or a running call.
    """

    def __init__(self) -> None:
        self.incomplete = False
        """True when calls could not be read back: an assistant message may be the reply of one."""
        self.turns: dict[str, Turn] = {}
        """Call -> its turn."""
        self._nodes: dict[bytes, Prefix] = {}
        """Digest of a prefix -> its node."""
        self._issued: dict[bytes | str, str] = {}
        """Digest of a reply by itself, the id of each of its tool calls, and its call's id -> the
        newest such call."""
        self._recent: WeakKeyDictionary[Part, RecentRequest] = WeakKeyDictionary()
        """Last part of a request -> the request, the newest last."""

    def read(self, model_call: ModelCall) -> Conversation:
        """Return the conversation of a request. Messages of a recent one are not read again."""
        system = replace(model_call, messages=leading_system(model_call))
        leading = len(system.messages)
        conversation = Conversation(model_call, self.read_after(None, system).path)
        if len(conversation.path) <= leading or conversation.path[-1].newest is None:
            return conversation  # no call has more of it
        messages = model_call.messages[leading:]
        conversation.path += self._read_before(conversation.path[-1], messages)
        self._follow(conversation)
        if model_call.parts:
            last = model_call.parts[-1]
            self._recent.pop(last, None)
            self._recent[last] = RecentRequest(messages, conversation.path[leading:])
        for part in [*self._recent][:-_RECENT]:
            del self._recent[part]
        return conversation

    def _read_before(self, system: Prefix, messages: list[Message]) -> list[Prefix]:
        """Return the path after the system messages as far as a recent request has it.

        Of the requests that these messages go on, only the nearest is still needed.
        """
        longest = [system]
        nearest: Part | None = None
        gone_on: list[Part] = []
        for part, recent in [*self._recent.items()]:
            if recent.path[0] is not system:
                continue
            shared = _shared(recent.messages, messages)
            path = recent.path[: shared + 1]
            if len(path) >= len(longest):
                longest = path
                nearest = part
            if 2 * shared > len(recent.messages):
                gone_on.append(part)
        for part in gone_on:
            if part is not nearest:
                del self._recent[part]
        return longest[1:]

    def read_after(self, parent: Turn | None, model_call: ModelCall) -> Conversation:
        """Return the conversation of a recorded request.

        `model_call` has the messages after the parent's conversation and reply.
        """
        start = parent.node if parent else None
        if start is None:
            digest = first_digest(model_call)
            start = self._nodes.get(digest) or Prefix(digest)
        return self._follow(Conversation(model_call, [start]))

    def match(self, conversation: Conversation) -> Match:
        """Find the call with the longest conversation and reply that the messages begin with.

        The other messages are new. They may include assistant messages that no call sampled: a
        program's examples, or notifications that it writes as if the model had asked for them.
        These are context.

        Where a recorded conversation has a reply and the request another assistant message, the
        program has changed its history, and also where a reply stands at another place.
        """
        end = len(conversation.path) - 1
        while end and not conversation.path[end].turns:
            end -= 1
        match = Match((), end)
        if end:
            match.turns = conversation.path[end].turns
        self._find_changed(match, conversation)
        if match.changed is not None:
            match.reason = self._why_changed(match.changed, match.call_id, conversation)
        elif not end:
            match.reason = self._why_new(conversation)
        return match

    def add(
        self,
        turn: Turn,
        conversation: Conversation,
        reply: Message,
        kind: CallKind,
    ) -> None:
        """Record a completed call.

        `conversation` has the messages after its parent's conversation and reply.
        """
        model_call = conversation.model_call
        path = [*conversation.path]
        self._nodes.setdefault(path[0].digest, path[0])
        known = path[-1].newest or path[-1]
        if turn.base is None and known.call_id:
            turn.store_after(self.turns[known.call_id])
        match = Match((), 0)
        if kind == "rendered":
            match = self.match(conversation)
        for message in [*conversation.unread, reply]:
            digest = extend_digest(path[-1].digest, message, model_call)
            excerpt = canonical(message, model_call)[:_EXCERPT]
            path.append(self._node(digest, turn.call_id, excerpt))
        for before, after in pairwise(path):
            before.newest = after
        if match.changed is not None:
            marked = path[match.changed + 1]
            marked.changed = marked.changed or match.call_id
        self._add_reply(turn, path[-2], path[-1], reply, model_call)

    def _add_reply(
        self,
        turn: Turn,
        asked: Prefix,
        node: Prefix,
        reply: Message,
        model_call: ModelCall,
    ) -> None:
        tool_calls = reply.get("tool_calls", ())
        says = bool(reply["content"].strip())
        turn.node = node
        turn.reasoning = reply.get("reasoning_content") or ""
        if says and tool_calls:
            turn.textless = extend_digest(asked.digest, {**reply, "content": ""}, model_call)
        asked.asked += (turn,)
        node.turns += (turn,)
        self.turns[turn.call_id] = turn
        for recent in [*self._recent.values()]:
            if asked in recent.path:
                del recent.path[recent.path.index(asked) + 1 :]
        self._issued[turn.call_id] = turn.call_id
        if says or tool_calls:
            self._issued[extend_digest(b"", reply, model_call)] = turn.call_id
        for tool_call in tool_calls:
            self._issued[tool_call["id"]] = turn.call_id

    def _node(self, digest: bytes, call_id: str, excerpt: str) -> Prefix:
        return self._nodes.setdefault(digest, Prefix(digest, call_id, excerpt))

    def _follow(self, conversation: Conversation) -> Conversation:
        """Extend the path of a conversation as far as its messages were recorded. Return it."""
        path = conversation.path
        for message in conversation.unread:
            node = self._after(path[-1], message, conversation.model_call)
            if node is None:
                break
            path.append(node)
        return conversation

    def _after(self, node: Prefix, message: Message, model_call: ModelCall) -> Prefix | None:
        """Return a prefix with the message after it, None if that was not recorded.

        For a changed echo it is the prefix with the recorded reply.
        """
        exact = self._nodes.get(extend_digest(node.digest, message, model_call))
        if message["role"] != "assistant" or not node.asked or (exact and exact.turns):
            return exact
        for form, reasoning in ((message, None), *issued_forms(message)):
            issued = extend_digest(node.digest, form, model_call)
            found = [self._nodes.get(issued)]
            with_text = {turn.node for turn in node.asked if turn.textless == issued}
            if len(with_text) == 1:
                found += with_text
            for reply in filter(None, found):
                if any(reasoning in (None, turn.reasoning) for turn in reply.turns):
                    return reply
        return exact

    def _find_changed(self, match: Match, conversation: Conversation) -> None:
        """Find the first new message that is a reply, changed or at another place.

        That is an assistant message which a call issued, which was found to be changed before, or
        which has a reply's place. After the messages of recorded conversations, the newest of
        these is followed. After a call to continue, each place has a reply as long as one is
        ahead: whoever inserts, drops or moves a message shifts them.
        """
        model_call = conversation.model_call
        messages = model_call.messages
        path = conversation.path
        places = [i for i in range(match.end, len(messages)) if messages[i]["role"] == "assistant"]
        if not places:
            return
        left = len(path) - 1
        ahead = _replies_ahead(path[-1])
        for i in places:
            here = ahead
            if not match.end:
                here = ahead[i - left : i - left + 1]
            call_ids = [self._issuer(messages[i], model_call)]
            if i < left:
                here = [path[i].reply]
                call_ids.append(path[i + 1].changed)
            call_ids += [reply.call_id for reply in here if reply]
            match.call_id = next(filter(None, call_ids), None)
            if match.call_id is not None:
                match.changed = i
                return
        if self.incomplete:
            match.changed = places[0]

    def _issuer(self, message: Message, model_call: ModelCall) -> str | None:
        """Return the newest call whose reply an assistant message is, or of which it has an id.

        The reply may be in any conversation, and the text may have a change that `issued_forms`
        undoes.
        """
        keys: list[bytes | str | None] = [message.get("call_id")]
        keys += [tool_call["id"] for tool_call in message.get("tool_calls", ())]
        for form in (message, *(form for form, _ in issued_forms(message))):
            keys.append(extend_digest(b"", form, model_call))
        for key in keys:
            if key in self._issued:
                return self._issued[key]
        return None

    def _why_changed(self, index: int, call_id: str | None, conversation: Conversation) -> str:
        path = conversation.path
        if call_id is None:
            return f"message {index} may be the reply of a call that cannot be read"
        if index < len(path) and (reply := path[index].reply) is not None:
            return _difference(conversation, index, reply)
        left = len(path) - 1
        if index < left or (left and path[-1].newest is None):
            return f"message {index} is the reply of call {call_id}, changed or at another place"
        return self._why_new(conversation)

    def _why_new(self, conversation: Conversation) -> str:
        """Say where a conversation leaves the recorded ones."""
        followed = conversation.path[-1].newest
        if not self.turns:
            return "no earlier call"
        if followed is None:
            return "its tools are not those of any earlier call"
        if not conversation.unread:
            return f"it ends within the conversation of call {followed.call_id}"
        return _difference(conversation, len(conversation.path) - 1, followed)


def _difference(conversation: Conversation, index: int, theirs: Prefix) -> str:
    model_call = conversation.model_call
    ours = canonical(model_call.messages[index], model_call)
    difference = describe_difference(ours, theirs.excerpt)
    return f"message {index} is not that of call {theirs.call_id}: {difference}"


def _shared(ours: list[Message], theirs: list[Message]) -> int:
    """Return the number of leading messages that are the same objects."""
    shared = 0
    for own, other in zip(ours, theirs, strict=False):
        if own is not other:
            break
        shared += 1
    return shared


def _replies_ahead(node: Prefix) -> list[Prefix | None]:
    """Return the replies among the messages that followed a prefix, None for the others."""
    ahead: list[Prefix | None] = []
    while node.newest is not None:
        ahead.append(node.reply)
        node = node.newest
    return ahead
