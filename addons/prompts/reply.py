"""The reply of a completion that grows, parsed in increments (`GrowingReply`), and its text as a stream (`TextDeltas`).

Parsing a completion is O(its length). While plain text grows, its new text is therefore the text of the new tokens. The
completion is parsed as a whole when markup arrives, within a budget that all streams share, and otherwise when it has
grown by an eighth, so that the total stays O(length of the completion).
"""

import re
import threading
import time
from collections.abc import Sequence

from rolltap.addons.dialects.model_call import Message, ModelCall, Reply, Tool, parse_arguments
from rolltap.addons.dialects.tools import calls_as_text
from rolltap.addons.prompts.rendering import Rendering
from rolltap.addons.prompts.tokenizer import Markup

_LONGEST_TAG = 33
"""Characters. A `<` further than this from the end of the text is not taken for the beginning of a tag."""
_OPEN_TAG = re.compile(r"<[^<>\n]*\Z")
LOOSE = "".join(c for c in map(chr, range(0x3001)) if c.isspace()) + "\ufffd"
"""White space and U+FFFD."""


class TextDeltas:
    """Text deltas of a reply that grows: by parsing it again (`feed`), or by the text of new tokens (`grow`).

    Sent text cannot be taken back. A later parse may contradict it: a `</think>` without an opening tag, for instance,
    turns text into reasoning. `finish` then replaces the reply's text by the text that was sent. Text that may be the
    beginning of one of `stop_texts` is held back: as in vLLM, one character less than the longest of them.
    """

    def __init__(self, stop_texts: Sequence[str] = ()) -> None:
        self._stop_texts = stop_texts
        self._held = _held_back(stop_texts)
        self.stopped = False
        """True after a stop text: the reply has ended."""
        self._sent_reasoning = ""
        self._sent_content = ""
        self._rest = ""
        """The text of the growing field that is not sent yet."""

    def feed(self, reply: Reply) -> tuple[str, str]:
        """Return the new reasoning and the new content of a partial reply, without text that may still change.

        Content ends the reasoning: all of it is returned when content begins, and none after the first content.
        """
        begun = bool(reply.content)
        cut_at_stop(reply, self._stop_texts, partial=True)
        self.stopped = reply.stop is not None
        reasoning = reply.reasoning if begun else settled(reply.reasoning)
        return self._send(reasoning, settled(reply.content))

    def expect(self, field: str, text: str) -> bool:
        """Prepare `grow`: `field` is `text` so far, and grows. Returns False when what was sent says otherwise."""
        sent = self._sent_content if field == "content" else self._sent_reasoning
        if not text.startswith(sent) or (field == "reasoning" and self._sent_content):
            return False
        self._rest = text[len(sent) :]
        return True

    def grow(self, field: str, text: str) -> tuple[str, str]:
        """Return the new reasoning and the new content when `text` is appended to the expected `field`.

        O(length of `text` and of what is held back).
        """
        self._rest += text
        if self.stopped or not (self._held or text.strip(LOOSE)):
            return "", ""
        stop = find_stop(self._rest, self._stop_texts)
        if stop is not None:
            self.stopped = True
            new = self._rest[: stop[0]]
        else:
            new = settled(self._rest[: max(0, len(self._rest) - self._held)])
            self._rest = self._rest[len(new) :]
        if field == "content":
            self._sent_content += new
            return "", new
        self._sent_reasoning += new
        return new, ""

    def finish(self, reply: Reply) -> tuple[str, str]:
        """Return the rest of the complete reply's text, and set the reply's text to all that was sent."""
        sent = self._send(reply.reasoning, reply.content)
        reply.reasoning, reply.content = self._sent_reasoning, self._sent_content
        return sent

    def _send(self, reasoning: str, content: str) -> tuple[str, str]:
        grown = reasoning.startswith(self._sent_reasoning) and not self._sent_content
        new_reasoning = reasoning[len(self._sent_reasoning) :] if grown else ""
        new_content = content[len(self._sent_content) :] if content.startswith(self._sent_content) else ""
        self._sent_reasoning += new_reasoning
        self._sent_content += new_content
        return new_reasoning, new_content


def cut_at_stop(reply: Reply, stop_texts: Sequence[str], *, partial: bool) -> None:
    """Truncate `reply` before the first stop text, in place.

    Its tool calls are dropped, and its content too when the stop text is in the reasoning.
    With `partial`, the end that may be the beginning of a stop text is removed too: the next tokens may complete it.
    """
    for field in ("reasoning", "content"):
        text: str = getattr(reply, field)
        found = find_stop(text, stop_texts)
        if found:
            setattr(reply, field, text[: found[0]])
            reply.stop, reply.tool_calls = found[1], []
            if field == "reasoning":
                reply.content = ""
            return
        if partial and (field == "content" or not reply.content):  # content ends the reasoning
            setattr(reply, field, text[: max(0, len(text) - _held_back(stop_texts))])


def is_sampled(
    message: Message,
    rendering: Rendering,
    prompt_ids: Sequence[int],
    completion_ids: list[int],
    tools: list[Tool],
    stop_texts: Sequence[str],
) -> bool:
    """Return True when a recorded reply is what its tokens say.

    Its tool calls are theirs, and its texts begin theirs. A stream may have ended them early, or have sent reasoning as
    content (`TextDeltas.finish`).
    """
    sampled = rendering.parse(prompt_ids, completion_ids, tools)
    cut_at_stop(sampled, stop_texts, partial=False)
    given = Reply.of_message({"content": "", **message}, None)
    if not given.tool_calls:
        calls_as_text(sampled)
    calls = [[(call.name, parse_arguments(call.arguments)) for call in reply.tool_calls] for reply in (given, sampled)]
    reasoning, content = ("".join(text.split()) for text in (sampled.reasoning, sampled.content))
    texts = ("".join(text.split()) for text in (given.reasoning, given.content))
    begun = all(any(whole.startswith(text) for whole in (content, reasoning + content)) for text in texts)
    return calls[0] == calls[1] and begun


def find_stop(text: str, stop_texts: Sequence[str]) -> tuple[int, str] | None:
    """Return the place of the first stop text in `text`, and the stop text; None without one."""
    places = ((text.find(stop), stop) for stop in stop_texts)
    return min((found for found in places if found[0] >= 0), default=None)


def _held_back(stop_texts: Sequence[str]) -> int:
    """Return the number of characters at the end of a text that may begin a stop text."""
    return max((len(stop) - 1 for stop in stop_texts), default=0)


def settled(text: str) -> str:
    """Return `text` without the suffix that the next token may change.

    The suffix is made of white space, which parsers strip before a tool call; U+FFFD, which stands for a character
    whose bytes are incomplete; and the beginning of a tag. O(length of the suffix).
    """
    text = text.rstrip(LOOSE)
    tag = _OPEN_TAG.search(text, max(0, len(text) - _LONGEST_TAG))
    return text[: tag.start()].rstrip(LOOSE) if tag else text


_LEAST_GROWTH = 64
"""Tokens. A completion that is not plain text is parsed again after so many, or after an eighth of its length."""
_SLOW_PARSE = 0.05
"""Seconds. A completion whose parse took longer is parsed again only when it has doubled: some grammars of `renderers`
take quadratic time."""
_WINDOW, _OVERLAP, _LONGEST_WINDOW = 64, 16, 1024
"""Tokens that are decoded together, tokens that a new window repeats, and a length beyond which text is not plain: a
run of bytes that are no characters."""


class GrowingReply:
    """The reply of one completion. `feed` it while it grows, then `finish` it once.

    `finish` may run in a thread while `feed` is called in the event loop: `feed` then returns nothing.
    """

    def __init__(self, rendering: Rendering, prompt_ids: Sequence[int], model_call: ModelCall) -> None:
        self._rendering = rendering
        self._prompt_ids = prompt_ids
        self._model_call = model_call
        self._deltas = TextDeltas(model_call.stop)
        self._plain: _PlainText | None = None
        """The growing text, while nothing but plain text arrives."""
        self._urgent = True
        """True when the new tokens hold markup, so that another parse is likely to find new text."""
        self._seen = 0
        """Tokens of the last `feed`."""
        self._parsed = 0
        """Tokens of the last parse of the whole completion."""
        self._slow = False
        """True when that parse was slow."""
        self._lengths = {"reasoning": 0, "content": 0}
        """Characters of each field that are known."""
        self._lock = threading.Lock()
        self._finished = False

    def feed(self, completion_ids: list[int]) -> tuple[str, str]:
        """Return the new reasoning and the new content of a completion that has grown.

        Text that later tokens may change is held back. Amortised O(number of new tokens).
        """
        if not self._lock.acquire(blocking=False):
            return "", ""
        try:
            if self._finished or self._deltas.stopped or len(completion_ids) <= self._seen:
                return "", ""
            return self._read(completion_ids)
        finally:
            self._lock.release()

    def finish(self, completion_ids: list[int]) -> tuple[Reply, tuple[str, str]]:
        """Return the complete reply, and its text that `feed` has not returned. Later calls of `feed` return nothing.

        The reply's text is all that was returned. O(length of the completion).
        """
        with self._lock:
            self._finished = True
            reply = self._parse(completion_ids, partial=False)
            cut_at_stop(reply, self._model_call.stop, partial=False)
            if not self._model_call.may_call:
                calls_as_text(reply)
            return reply, self._deltas.finish(reply)

    def _read(self, completion_ids: list[int]) -> tuple[str, str]:
        new_ids, self._seen = completion_ids[self._seen :], len(completion_ids)
        if self._plain is not None:
            text = self._plain.read(completion_ids)
            if text is not None:
                self._lengths[self._plain.field] += len(text)
                return self._deltas.grow(self._plain.field, text)
            self._plain, self._urgent = None, True
        self._urgent = self._urgent or self._rendering.markup.in_tokens(new_ids)
        if not self._due(len(completion_ids) - self._parsed):
            return "", ""
        self._parsed = len(completion_ids)
        started = time.thread_time()
        new = self._read_whole(completion_ids)
        seconds = time.thread_time() - started
        self._slow = seconds > _SLOW_PARSE
        self._rendering.parse_budget.spend(seconds)
        return new

    def _due(self, grown: int) -> bool:
        """Return whether to parse the whole completion, which has grown by `grown` tokens since the last time."""
        if self._slow:
            return grown >= self._parsed
        enough = max(_LEAST_GROWTH, self._parsed // 8)
        return grown >= enough or (self._urgent and self._rendering.parse_budget.allows())

    def _read_whole(self, completion_ids: list[int]) -> tuple[str, str]:
        """Parse the whole completion, and find out whether plain text grows at its end.

        It does when the text after the last markup is the end of a field that has grown. Text in a tool call is no
        such end, even when the text before the call happens to end like it.
        """
        reply = self._parse(completion_ids, partial=True)
        field = "content" if reply.content else "reasoning"
        text = getattr(reply, field).rstrip(LOOSE)
        has_grown = len(text) > self._lengths[field]
        self._lengths[field] = len(text)
        new = self._deltas.feed(reply)
        before, after = self._rendering.markup.around_last(completion_ids)
        end = after.strip(LOOSE)
        self._urgent = not end or settled(text) != text  # an open tag may be text only as long as it is open
        if not self._urgent and has_grown and text.endswith(end) and not before.rstrip(LOOSE).endswith(end):
            after = after.rstrip("\ufffd")
            if self._deltas.expect(field, text + after[len(after.rstrip(LOOSE)) :]):
                self._plain = _PlainText(self._rendering.markup, field, after, completion_ids)
        return new

    def _parse(self, completion_ids: list[int], *, partial: bool) -> Reply:
        model_call = self._model_call
        reply = self._rendering.parse(self._prompt_ids, completion_ids, model_call.tools, partial=partial)
        # a model that was not held to its schema reasons before the JSON
        begun = reply.reasoning.lstrip()
        texts = model_call.schema["enum"] if model_call.schema and model_call.bare else ()
        of_schema = not partial or begun[:1] in ("{", "[") or any(text.startswith(begun) for text in texts)
        if model_call.grammar is not None and not reply.content and of_schema:
            # structured output is JSON from the first token, but the template may have opened the reasoning before it
            reply.content, reply.reasoning = reply.reasoning, ""
        return reply


class _PlainText:
    """Plain text that grows at the end of a completion, read through a window of its last tokens."""

    def __init__(self, markup: Markup, field: str, text: str, completion_ids: list[int]) -> None:
        """Begin after `text`, the text after the last markup without incomplete characters."""
        self.field = field
        self._markup = markup
        self._tail = text[max(0, len(text) - markup.longest) :]
        self._start, self._known, self._read = len(completion_ids), "", len(completion_ids)
        self._move(text, completion_ids)

    def read(self, completion_ids: list[int]) -> str | None:
        """Return the text of the new tokens, without incomplete characters; None when it may hold markup."""
        if self._markup.in_tokens(completion_ids[self._read :]) or not self._known:
            return None
        window = self._markup.decode(completion_ids[self._start :]).rstrip("\ufffd")
        if not window.startswith(self._known):
            return None
        text = window[len(self._known) :]
        searched = self._tail + text
        if self._markup.in_text(searched):
            return None
        self._tail = searched[max(0, len(searched) - self._markup.longest) :]
        self._known, self._read = window, len(completion_ids)
        length = len(completion_ids) - self._start
        if length > _WINDOW:
            self._move(window, completion_ids)
        return text if length <= _LONGEST_WINDOW else None

    def _move(self, text: str, completion_ids: list[int]) -> None:
        """Begin a new window, at a token that begins a character of `text`."""
        for start in range(max(0, len(completion_ids) - _OVERLAP), len(completion_ids)):
            window = self._markup.decode(completion_ids[start:]).rstrip("\ufffd")
            if window and text.endswith(window):
                self._start, self._known, self._read = start, window, len(completion_ids)
                return
