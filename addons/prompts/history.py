"""Conversation to prompt token ids: continue a recorded call token for token, or render in full and record why.

`History.match` compares the messages of a request with the recorded conversations of its session. It returns

    Continued   they begin with a call's conversation and reply: the prompt is that call's prompt, its sampled tokens,
                and the tokens of the new messages
    Changed     one of them is a reply, changed or at another place: all messages are rendered
    New         none of them is a reply: all messages are rendered, and the call is a root

Messages are compared in their canonical form (`canonical.py`); no text is tokenised again. Reasoning is not compared,
because some harnesses drop it. Reasoning, and the opaque field issued with it (`call_id`), only decide between calls
that are otherwise equal.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import numpy as np

from rolltap.addons.dialects.call import Message, ModelCall
from rolltap.addons.prompts.canonical import (
    canonical,
    describe_difference,
    echoed_reasoning,
    extend_digest,
    first_digest,
    issued_forms,
    message_digest,
    opening_digest,
    textless,
)
from rolltap.addons.prompts.rendering import Rendering
from rolltap.addons.store.records import CallKind

TEXT_DROPPED = "the request shows the parent's reply without the text beside its tool calls"
"""The reason of a continued call."""
_EXCERPT = 400
"""Characters of each recorded message that are kept to show a difference."""
_RECENT = 4
"""Number of requests whose messages are not read again: agents and sub-agents alternate."""


@dataclass(slots=True, eq=False)
class Turn:
    """A recorded call as later calls continue it.

    Its prompt begins with the first `shared` tokens of the prompt and completion of `base`. Only
    the tokens after them are stored, so that memory grows linearly with a conversation, also when
    its calls are rendered.
    """

    call_id: str
    base: "Turn | None"
    """The parent of a continued call; of a rendered one, the call with the most messages in common."""
    shared: int
    tail_ids: "array[int]"
    completion_ids: "array[int]"
    hashed: "hashlib.blake2b" = field(default_factory=partial(hashlib.blake2b, digest_size=16))
    """Hash of the ids of the prompt and the completion."""
    opening: bytes = b""
    """The `Prompt.opening`."""
    reasoning: str = ""
    node: "Node | None" = None
    """The conversation with the reply."""
    textless: bytes | None = None
    """Digest of the conversation and the reply without its text, if this has text beside tool calls."""

    @property
    def length(self) -> int:
        """The number of tokens of the prompt and the completion."""
        return self.shared + len(self.tail_ids) + len(self.completion_ids)

    def prompt_ids(self) -> "array[int]":
        """Return the full prompt of the call, in O(length of the prompt + number of turns below it)."""
        return self.ids(self.length - len(self.completion_ids))

    def ids(self, needed: int) -> "array[int]":
        """Return the first `needed` tokens of the prompt and the completion."""
        pieces: list[array[int]] = []
        turn: Turn | None = self
        while turn is not None:
            pieces.append((turn.tail_ids + turn.completion_ids)[: max(0, needed - turn.shared)])
            needed = min(needed, turn.shared)
            turn = turn.base
        joined = array("i")
        for piece in reversed(pieces):
            joined += piece
        return joined

    def store_after(self, base: "Turn") -> None:
        """Keep of a full prompt only the tokens after those that it has in common with another call."""
        length = min(base.length, len(self.tail_ids))
        ours = np.frombuffer(self.tail_ids, np.int32)[:length]
        theirs = np.frombuffer(base.ids(length), np.int32)
        different = np.flatnonzero(ours != theirs)
        self.base = base
        self.shared = int(different[0]) if len(different) else length
        self.tail_ids = self.tail_ids[self.shared :]


@dataclass(slots=True, eq=False)
class Node:
    """A prefix of recorded conversations, with the reply where it ends with one."""

    digest: bytes
    """Digest of the tools, the echo rule and all messages."""
    call_id: str
    """The first call that had it."""
    excerpt: str = ""
    """The first `_EXCERPT` characters of its last message in the canonical form."""
    newest: "Node | None" = None
    """The prefix with the newest message that followed it."""
    asked: tuple[Turn, ...] = ()
    """The calls whose conversation it is."""
    turns: tuple[Turn, ...] = ()
    """The calls whose conversation and reply it is."""
    changed: str | None = None
    """The call whose reply was its last message before it was changed, in a call that was rendered."""

    @property
    def reply(self) -> "Node | None":
        """The newest reply to it."""
        return self.asked[-1].node if self.asked else None


@dataclass(slots=True)
class Conversation:
    """The messages of a request, or those after a recorded call."""

    model_call: ModelCall
    path: list[Node]
    """The recorded prefixes: `path[n]` has `messages[:n]` after all that is before them."""

    def digest(self) -> bytes:
        """Return the digest of all messages."""
        model_call, path = self.model_call, self.path
        digest = path[-1].digest if path else first_digest(model_call)
        for message in model_call.messages[max(0, len(path) - 1) :]:
            digest = extend_digest(digest, message, model_call)
        return digest


@dataclass(frozen=True, slots=True)
class Continued:
    """The messages begin with the conversation and reply of recorded calls, and none after these is a reply."""

    turns: Sequence[Turn]
    """All calls with this conversation and reply."""
    end: int
    """The number of messages of the conversation and reply. Those after them are new."""

    @property
    def sampled_by(self) -> str:
        """A call that sampled the reply."""
        return self.turns[0].call_id

    def turn(self, echo: Message) -> Turn | None:
        """Return the call that issued the echoed reply, None when that is ambiguous. Calls of equal tokens are one."""
        turns = self.turns
        if len(turns) > 1:
            reasoning = echoed_reasoning(echo)
            issued = [turn for turn in turns if turn.call_id == echo.get("call_id")]
            turns = issued[:1] or [turn for turn in turns if turn.reasoning == reasoning]
        if len(turns) > 1:
            first = turns[0]
            for turn in turns[1:]:
                same = turn.completion_ids == first.completion_ids
                if not same or turn.prompt_ids() != first.prompt_ids():
                    return None
        return turns[0] if turns else None


@dataclass(frozen=True, slots=True)
class Changed:
    """A message is a recorded reply, changed or at another place."""

    index: int
    """That of the first such message."""
    call_id: str | None
    """The call of the reply; None when that may be one that cannot be read."""
    sampled_by: str | None
    """The call with the longest conversation and reply that the messages begin with, else that of the reply."""
    reason: str


@dataclass(frozen=True, slots=True)
class New:
    """No message is a recorded reply."""

    reason: str
    sampled_by: None = None


class History:
    """The conversations and replies of one session's recorded calls, as a tree of prefixes. Not thread-safe.

    Holds token ids, digests and excerpts of messages: 4 bytes a token and about 1 KB a message.
    """

    def __init__(self) -> None:
        self.incomplete = False
        """True when calls of the session could not be read back: an assistant message may be the reply of one."""
        self.turns: dict[str, Turn] = {}
        """Call -> its turn."""
        self._nodes: dict[bytes, Node] = {}
        """Digest of a prefix -> its node."""
        self._issued: dict[bytes | str, str] = {}
        """Digest of a reply by itself, the id of each of its tool calls, and its call's id -> the newest such call."""
        self._recent: list[Conversation] = []
        """The newest requests, of which each path ends where a reply was recorded since."""

    def read(self, model_call: ModelCall) -> Conversation:
        """Return the conversation of a request. Messages that a recent one has too are not read."""
        root = self._nodes.get(first_digest(model_call))
        conversation = Conversation(model_call, [root] if root else [])
        nearest = None
        for recent in self._recent:
            shared = _shared(recent.model_call.messages, model_call.messages)
            path = recent.path[: shared + 1]
            if path[:1] == [root] and len(path) >= len(conversation.path):
                conversation.path = path
                nearest = recent if 2 * shared > len(recent.model_call.messages) else None
        self._follow(conversation)
        self._recent = [recent for recent in self._recent if recent is not nearest][1 - _RECENT :]
        self._recent.append(conversation)
        return conversation

    def read_after(self, parent: Turn | None, model_call: ModelCall) -> Conversation:
        """Return the conversation of a recorded request, of which `model_call` has the messages after the parent's."""
        start = self._nodes.get(first_digest(model_call)) if parent is None else parent.node
        return self._follow(Conversation(model_call, [start] if start else []))

    def match(self, conversation: Conversation) -> Continued | Changed | New:
        """Find the call with the longest conversation and reply that the messages begin with.

        The other messages are new. They may include assistant messages that no call sampled: a program's examples, or
        notifications that it writes as if the model had asked for them. These are context.

        Where a recorded conversation has a reply and the request another assistant message, the program has changed its
        history, and also where a reply stands at another place.
        """
        path = conversation.path
        end = max(0, len(path) - 1)
        while end > 0 and not path[end].turns:
            end -= 1
        turns = path[end].turns if end else ()
        changed = self._changed_reply(conversation, end)
        if changed is not None:
            index, call_id = changed
            sampled_by = turns[0].call_id if turns else call_id
            return Changed(index, call_id, sampled_by, self._why_changed(conversation, index, call_id))
        return Continued(turns, end) if turns else New(self._why_new(conversation))

    def add(self, turn: Turn, conversation: Conversation, reply: Message, kind: CallKind) -> None:
        """Record a completed call. `conversation` has the messages after its parent's conversation and reply."""
        model_call, path = conversation.model_call, [*conversation.path]
        found = self.match(conversation) if kind == "rendered" else None
        if turn.base is None and path:
            last = path[-1]
            known = last.turns[-1] if last.turns else self.turns[last.call_id]
            turn.store_after(known)
        if not path:
            path.append(self._node(first_digest(model_call), turn.call_id))
        for message in [*model_call.messages[len(path) - 1 :], reply]:
            digest = extend_digest(path[-1].digest, message, model_call)
            path.append(self._node(digest, turn.call_id, canonical(message, model_call)[:_EXCERPT]))
        for before, after in pairwise(path):
            before.newest = after
        if isinstance(found, Changed) and found.call_id is not None:
            marked = path[found.index + 1]
            marked.changed = marked.changed or found.call_id
        asked, end = path[-2:]
        for recent in self._recent:
            if asked in recent.path:
                del recent.path[recent.path.index(asked) + 1 :]
        turn.node = end
        turn.reasoning = reply.get("reasoning_content") or ""
        if reply["content"].strip() and reply.get("tool_calls"):
            turn.textless = extend_digest(asked.digest, {**reply, "content": ""}, model_call)
        asked.asked += (turn,)
        end.turns += (turn,)
        self.turns[turn.call_id] = turn
        self._issued[turn.call_id] = turn.call_id
        if reply["content"].strip() or reply.get("tool_calls"):
            self._issued[message_digest(reply, model_call)] = turn.call_id
        for tool_call in reply.get("tool_calls", ()):
            self._issued[tool_call["id"]] = turn.call_id

    def _node(self, digest: bytes, call_id: str, excerpt: str = "") -> Node:
        return self._nodes.setdefault(digest, Node(digest, call_id, excerpt))

    def _follow(self, conversation: Conversation) -> Conversation:
        """Extend the path of a conversation as far as its messages were recorded. Returns the conversation."""
        path, model_call = conversation.path, conversation.model_call
        node = path[-1] if path else None
        for message in model_call.messages[max(0, len(path) - 1) :]:
            if node is not None:
                node = self._after(node, message, model_call)
            if node is None:
                break
            path.append(node)
        return conversation

    def _after(self, node: Node, message: Message, model_call: ModelCall) -> Node | None:
        """Return a prefix and the message after it; for a changed echo, with the recorded reply in its place."""
        exact = self._nodes.get(extend_digest(node.digest, message, model_call))
        if message["role"] != "assistant" or not node.asked or (exact and exact.turns):
            return exact
        for form, reasoning in ((message, None), *issued_forms(message)):
            issued = extend_digest(node.digest, form, model_call)
            whole = {turn.node for turn in node.asked if turn.textless == issued}
            for found in (self._nodes.get(issued), whole.pop() if len(whole) == 1 else None):
                if found and any(reasoning in (None, turn.reasoning) for turn in found.turns):
                    return found
        return exact

    def _changed_reply(self, conversation: Conversation, start: int) -> tuple[int, str | None] | None:
        """Return the first message from `start` on that is a reply, changed or at another place, with the reply's call.

        That is an assistant message which a call issued, which was found to be changed before, or which has a reply's
        place. After the messages of recorded conversations, the newest of these is followed. After a call to
        continue, each place has a reply as long as one is ahead: whoever inserts, drops or moves a message shifts them.
        """
        model_call, path = conversation.model_call, conversation.path
        messages = model_call.messages
        places = [i for i in range(start, len(messages)) if messages[i]["role"] == "assistant"]
        if not places:
            return None
        left = max(0, len(path) - 1)
        ahead = _replies_ahead(path[-1]) if path else []
        for i in places:
            here = ahead if start else ahead[i - left : i - left + 1]
            if i < left:
                reply = path[i].reply
                here = [reply.call_id if reply else None]
            changed = path[i + 1].changed if i + 1 < len(path) else None
            found = self._issuer(messages[i], model_call) or changed or next(filter(None, here), None)
            if found is not None:
                return i, found
        return (places[0], None) if self.incomplete else None

    def _issuer(self, message: Message, model_call: ModelCall) -> str | None:
        """Return the newest call whose reply an assistant message is, or of which it has an id; None if it has none.

        The reply may be in any conversation, and the text may have a change that `issued_forms` undoes.
        """
        for issued in (message.get("call_id"), *(call["id"] for call in message.get("tool_calls", ()))):
            if issued in self._issued:
                return self._issued[issued]
        for form in (message, *(form for form, _ in issued_forms(message))):
            found = self._issued.get(message_digest(form, model_call))
            if found is not None:
                return found
        return None

    def _why_changed(self, conversation: Conversation, index: int, call_id: str | None) -> str:
        path = conversation.path
        if call_id is None:
            return f"message {index} may be the reply of a call that cannot be read"
        reply = path[index].reply if index < len(path) else None
        if reply is not None:
            return self._difference(conversation, index, reply)
        if path and (index < len(path) - 1 or path[-1].newest is None):
            return f"message {index} is the reply of call {call_id}, changed or at another place"
        return self._why_new(conversation)

    def _why_new(self, conversation: Conversation) -> str:
        """Say where a conversation leaves the recorded ones."""
        path = conversation.path
        if not path:
            return "its tools are not those of any earlier call" if self.turns else "no earlier call"
        followed = path[-1].newest
        assert followed is not None, "a recorded prefix without a reply is followed by a message"
        shared = len(path) - 1
        if shared == len(conversation.model_call.messages):
            return f"it ends within the conversation of call {followed.call_id}"
        return self._difference(conversation, shared, followed)

    def _difference(self, conversation: Conversation, index: int, theirs: Node) -> str:
        ours = canonical(conversation.model_call.messages[index], conversation.model_call)
        difference = describe_difference(ours, theirs.excerpt)
        return f"message {index} is not that of call {theirs.call_id}: {difference}"


def _shared(ours: list[Message], theirs: list[Message]) -> int:
    """Return the number of leading messages that are the same objects, or of the same texts."""
    shared = 0
    for own, other in zip(ours, theirs, strict=False):
        # arguments of calls may be equal and have other types, as 1 and true have
        if own is not other and ("tool_calls" in own or own != other):
            break
        shared += 1
    return shared


def _replies_ahead(node: Node) -> list[str | None]:
    """Return the calls whose replies the messages are that followed a prefix, None for the other messages."""
    ahead: list[str | None] = []
    while node.newest is not None:
        ahead.append(node.reply.call_id if node.reply else None)
        node = node.newest
    return ahead


@dataclass(slots=True)
class Prompt:
    """The prompt of a call, and how it was made."""

    model_call: ModelCall = field(repr=False)
    ids: "array[int]"
    kind: CallKind
    reason: str | None
    """The `Call.kind_reason`."""
    parent: Turn | None
    prefix_length: int
    """The number of leading `ids` that are the parent's prompt and completion."""
    new_messages: list[Message]
    """The messages after the parent's conversation and reply. Without a parent, all messages."""
    sampled_by: str | None = None
    """The parent, else a call whose reply is among the messages; None when there is no such call."""

    @property
    def opening(self) -> bytes:
        """The `opening_digest` of the conversation."""
        return self.parent.opening if self.parent else opening_digest(self.model_call)

    def digest(self) -> bytes:
        """Return the digest of the ids, of which only those after the parent's are read."""
        return _hash_after(self.parent, self.ids[self.prefix_length :]).digest()


class Conversations:
    """The history of one session, and the prompts of its calls. Not thread-safe."""

    def __init__(self, rendering: Rendering) -> None:
        self.history = History()
        self._rendering = rendering

    def prompt(self, model_call: ModelCall) -> Prompt:
        """Return the prompt of a new call: see `History.match`.

        A call that could be continued is rendered too when its echo fits several calls, and when the renderer refuses.
        """
        conversation = self.history.read(model_call)
        found = self.history.match(conversation)
        continued = self._continue(model_call, found) if isinstance(found, Continued) else found.reason
        if isinstance(continued, Prompt):
            return continued
        messages = model_call.messages
        ids = array("i", self._rendering.render(self._with_reasoning(messages), model_call.tools))
        kind: CallKind = "root" if isinstance(found, New) else "rendered"
        return Prompt(model_call, ids, kind, continued, None, 0, messages, found.sampled_by)

    def sampled_by(self, model_call: ModelCall) -> str | None:
        """Return the `Prompt.sampled_by` of a request, without its prompt."""
        return self.history.match(self.history.read_after(None, model_call)).sampled_by

    def add(self, call_id: str, prompt: Prompt, completion_ids: Sequence[int], reply: Message) -> None:
        """Record a completed call for later calls to continue. `reply` is the message that the harness receives."""
        new = replace(prompt.model_call, messages=prompt.new_messages)
        tail_ids = prompt.ids[prompt.prefix_length :]
        self.restore(call_id, prompt.parent, tail_ids, completion_ids, new, reply, prompt.kind)

    def restore(
        self,
        call_id: str,
        parent: Turn | None,
        tail_ids: Sequence[int],
        completion_ids: Sequence[int],
        model_call: ModelCall,
        reply: Message,
        kind: CallKind,
    ) -> Turn:
        """Record a completed call from what its row has: what is known of calls follows from their rows and the order.

        Echoes in the request are compared with the replies of the calls before it in the order of completion, not with
        those that were complete when it came. `model_call` has the tools that the model saw, the echo rule, and only
        the new messages. Restored once more under another echo rule, a call can be found by the requests of either.
        """
        tail = array("i", tail_ids)
        completion = array("i", completion_ids)
        hashed = _hash_after(parent, tail)
        hashed.update(completion)
        opening = parent.opening if parent else opening_digest(model_call)
        turn = Turn(call_id, parent, parent.length if parent else 0, tail, completion, hashed, opening)
        self.history.add(turn, self.history.read_after(parent, model_call), reply, kind)
        return turn

    def _continue(self, model_call: ModelCall, found: Continued) -> Prompt | str:
        """Return the prompt that continues a call, or why none can be continued."""
        messages, end = model_call.messages, found.end
        turn = found.turn(messages[end - 1])
        if turn is None:
            return f"{len(found.turns)} earlier calls fit equally well up to message {end}"
        ids = turn.prompt_ids()
        new_messages = self._with_reasoning(messages[end:])
        completion_ids = turn.completion_ids.tolist()
        extension = self._rendering.extension(ids, completion_ids, new_messages, model_call.tools)
        if extension is None:
            return self._rendering.refusal or f"the renderer cannot continue call {turn.call_id}"
        ids += turn.completion_ids
        ids.extend(extension)
        reason = TEXT_DROPPED if turn.textless and textless(messages[end - 1]) else None
        return Prompt(model_call, ids, "bridged", reason, turn, turn.length, messages[end:], turn.call_id)

    def _with_reasoning(self, messages: list[Message]) -> list[Message]:
        """Return the messages with recorded reasoning where the harness sent only the opaque field issued with it."""
        written: list[Message] = []
        for message in messages:
            turn = self.history.turns.get(message.get("call_id", ""))
            if turn is not None and turn.reasoning and not message.get("reasoning_content"):
                message = {**message, "reasoning_content": turn.reasoning}
            written.append(message)
        return written


def ids_digest(ids: Sequence[int]) -> bytes:
    """Return the digest of the ids of a prompt, as `Prompt.digest` does."""
    return _hash_after(None, array("i", ids)).digest()


def _hash_after(parent: Turn | None, ids: "array[int]") -> "hashlib.blake2b":
    """Return the hash of a turn's ids and the ids after them."""
    hashed = parent.hashed.copy() if parent else hashlib.blake2b(digest_size=16)
    hashed.update(ids)
    return hashed
