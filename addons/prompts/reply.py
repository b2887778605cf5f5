"""The reply in sampled tokens, parsed once, as they are sampled (`SampledReply`): streamed text, calls, reasoning.

Text that later tokens may change is held back: the beginning of a mark or of a stop text, and white space, which may be
the end of a field. What was returned never changes. The work is O(number of new tokens).
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from rolltap.addons.dialects.call import Message, Reply, Tool, parse_arguments
from rolltap.addons.dialects.tools import calls_as_text
from rolltap.addons.prompts.calls import UNREADABLE, Family
from rolltap.addons.prompts.marks import MarkScanner, Part
from rolltap.addons.prompts.tokenizer import TokenTexts

NewText = tuple[str, str]
"""New reasoning and new content of a reply. Content ends the reasoning: none comes after the first content."""


class FieldText:
    """A text of a reply while it grows: without white space at its ends, up to the first stop text.

    As in vLLM, one character less than the longest stop text is held back.
    """

    def __init__(self, stop_texts: Sequence[str]) -> None:
        self._stop_texts = stop_texts
        self._longest_stop = max(map(len, stop_texts), default=1)
        self._returned: list[str] = []
        self._held = ""
        """Text that may begin a stop text."""
        self._space: list[str] = []
        """White space after that text."""
        self.begun = False
        """True when there is more than white space."""
        self.stop: str | None = None
        """The stop text that ended the text."""

    @property
    def text(self) -> str:
        """All text that was returned."""
        return "".join(self._returned)

    def add(self, text: str) -> str:
        """Append text. Returns the text that is final now."""
        if not self.begun:
            text = text.lstrip()
        inner = text.rstrip()
        if inner:
            self.begun = True
            self._held += "".join(self._space) + inner
            self._space.clear()
        self._space.append(text[len(inner) :])
        return self._release(self._longest_stop - 1)

    def finish(self) -> str:
        """Return the rest of the text."""
        return self._release(0)

    def _release(self, num_held: int) -> str:
        if self.stop is not None:
            return ""
        end = max(0, len(self._held) - num_held)
        found = find_stop(self._held, self._stop_texts)
        if found is not None:
            end, self.stop = found
        text = self._held[:end]
        self._held = self._held[end:]
        self._returned.append(text)
        return text


def find_stop(text: str, stop_texts: Sequence[str]) -> tuple[int, str] | None:
    """Return the place of the first stop text in `text`, and the stop text; None without one."""
    places = [(text.find(stop_text), stop_text) for stop_text in stop_texts]
    return min((place for place in places if place[0] >= 0), default=None)


class ReplyParser:
    """The reply in a text that grows after a prompt. `feed` it, then `finish` it once.

    A tool call that cannot be read, or has not ended, is part of the content, and `Reply.unread` says why. With
    `is_json`, reasoning that does not end is content: a prompt may have opened it before the JSON.
    """

    def __init__(
        self,
        family: Family,
        prompt_end: str,
        tools: Sequence[Tool],
        stop_texts: Sequence[str] = (),
        *,
        is_json: bool = False,
    ) -> None:
        self._family = family
        self._tools = tools
        self._scanner = MarkScanner(family.template)
        begun = family.begun_by(prompt_end)
        self._place = sum(len(part.text) for part in self._scanner.feed(begun)) - len(begun)
        """Number of characters before the next part, from the end of the prompt on."""
        self._reply = Reply()
        self._reasoning = FieldText(stop_texts)
        self._content = FieldText(stop_texts)
        self._call: list[str] = []
        """Texts of the open tool call, first its mark."""
        self._outside: list[str] = []
        """Texts outside of all fields, of a family that marks its content."""
        self._undecided: list[str] | None = [] if is_json else None
        """Reasoning that may be content; None when no reasoning may."""
        self._begin = 0
        self.reasoning_spans: list[tuple[int, int]] = []
        """Begin and end of each part of the reasoning, with its mark, as numbers of characters of the text."""

    @property
    def _stop(self) -> str | None:
        """The stop text that has ended the reply."""
        return self._reasoning.stop or self._content.stop

    def feed(self, text: str) -> NewText:
        """Return what is final of the reply now, and was not before."""
        return self._add(self._scanner.feed(text))

    def finish(self, end: str = "", *, may_call: bool = True) -> tuple[Reply, NewText]:
        """Return the reply, and what `feed` has not returned of it.

        `end` is the text of the token that ends the turn, which is no text of the reply. Unless the reply `may_call`,
        tool calls are lines of JSON in its content.
        """
        parts = [*self._scanner.feed(end), *self._scanner.finish()]
        if end and parts and parts[-1].kind == "text":
            parts[-1] = Part("text", parts[-1].field, parts[-1].text.removesuffix(end))
        new = [self._add(parts)]
        if self._stop is None:
            new += self._end()
        reply = self._reply
        reply.stop = self._stop
        if reply.stop is not None:
            reply.tool_calls = []
        reply.reasoning = self._reasoning.text
        reply.content = self._content.text
        if not may_call:
            before = len(reply.content)
            calls_as_text(reply)
            new.append(("", reply.content[before:]))
        return reply, _joined(new)

    def _end(self) -> list[NewText]:
        """Return the rest of all texts."""
        new = []
        if self._call:
            self._reply.unread = "the call has not ended"
            new.append(self._add_content("".join(self._call)))
        if self._undecided:
            self.reasoning_spans.clear()
            new.append(self._add_content("".join(self._undecided)))
        if not (self._reasoning.begun or self._content.begun or self._reply.tool_calls):
            new.append(self._add_content("".join(self._outside)))
        new.append((self._reasoning.finish(), ""))
        new.append(("", self._content.finish()))
        return new

    def _add(self, parts: Iterable[Part]) -> NewText:
        new = []
        for part in parts:
            if self._stop is None:
                new.append(self._add_part(part))
            self._place += len(part.text)
        return _joined(new)

    def _add_part(self, part: Part) -> NewText:
        match part.field, part.kind:
            case "tool_calls", "close":
                return self._add_call(part.text)
            case "tool_calls", _:
                self._call.append(part.text)
            case None, _:
                self._outside.append(part.text)
            case "content", "text":
                return self._add_content(part.text)
            case "content", _:
                pass
            case _, "open":
                self._begin = self._place
                if self._reasoning.begun:
                    self._reasoning.add("\n\n")
            case _, "text":
                self._note_reasoning(part.text)
                if self._undecided is None:
                    return self._add_reasoning(part.text)
                self._undecided.append(part.text)
            case _, "close" if self._undecided is not None:
                texts, self._undecided = self._undecided, None
                return self._add_reasoning("".join(texts))
        return "", ""

    def _note_reasoning(self, text: str) -> None:
        length = len(text.rstrip())
        if length == 0:
            return
        if self.reasoning_spans and self.reasoning_spans[-1][0] == self._begin:
            self.reasoning_spans.pop()
        self.reasoning_spans.append((self._begin, self._place + length))

    def _add_reasoning(self, text: str) -> NewText:
        if self._content.begun:
            return "", ""
        return self._reasoning.add(text), ""

    def _add_content(self, text: str) -> NewText:
        content = self._content.add(text)
        reasoning = self._reasoning.finish() if self._content.begun else ""
        return reasoning, content

    def _add_call(self, closing: str) -> NewText:
        opening, content = self._call[0], "".join(self._call[1:])
        self._call = []
        try:
            self._reply.tool_calls += self._family.read_calls(opening, content, closing, self._tools)
        except UNREADABLE as error:
            self._reply.unread = f"the call cannot be read: {error or type(error).__name__}"
            return self._add_content(opening + content + closing)
        return "", ""


def _joined(new: Iterable[NewText]) -> NewText:
    texts = [*new]
    return "".join(reasoning for reasoning, _ in texts), "".join(content for _, content in texts)


class SampledReply:
    """The reply in the tokens of one call. `feed` it while they are sampled, then `finish` it once."""

    def __init__(
        self,
        parser: ReplyParser,
        decode: Callable[[list[int]], str],
        stop_ids: Iterable[int],
        *,
        may_call: bool,
    ) -> None:
        self._parser = parser
        self._may_call = may_call
        self._decode = decode
        self._texts = TokenTexts(decode)
        self._stop_ids = frozenset(stop_ids)
        self._end: int | None = None
        """The newest token, if it ends the turn unless another one follows."""
        self._length = 0
        self._lengths = array("Q")
        """Number of characters up to each token."""

    def feed(self, token_ids: Iterable[int]) -> NewText:
        """Return the new text of the reply after new tokens."""
        texts = []
        for token_id in token_ids:
            if self._end is not None:
                texts.append(self._read(self._end))
                self._end = None
            if token_id in self._stop_ids:
                self._end = token_id
            else:
                texts.append(self._read(token_id))
        return self._parser.feed("".join(texts))

    def finish(self) -> tuple[Reply, NewText]:
        """Return the reply, and its text that `feed` has not returned."""
        last = self._parser.feed(self._texts.finish())
        end = "" if self._end is None else self._decode([self._end])
        reply, new = self._parser.finish(end, may_call=self._may_call)
        return reply, _joined([last, new])

    @property
    def reasoning_tokens(self) -> int:
        """The number of tokens of the reasoning with the marks before it."""
        count = 0
        for begin, end in self._parser.reasoning_spans:
            count += self._tokens_up_to(end) - self._tokens_up_to(begin)
        return count

    def _tokens_up_to(self, length: int) -> int:
        if length <= 0:
            return 0
        return min(bisect_left(self._lengths, length) + 1, len(self._lengths))

    def _read(self, token_id: int) -> str:
        text = self._texts.add(token_id)
        self._length += len(text)
        self._lengths.append(self._length)
        return text


def read_text(family: Family, prompt_end: str, text: str, tools: Sequence[Tool]) -> Reply:
    """Return the reply in a whole `text`, which follows a prompt that ends with `prompt_end`."""
    parser = ReplyParser(family, prompt_end, tools)
    parser.feed(text)
    reply, _ = parser.finish()
    return reply


def is_sampled(message: Message, sampled: Reply) -> bool:
    """Return True when a recorded reply is what its tokens say, which is `sampled`; changes `sampled`.

    Its tool calls are theirs, and its texts begin theirs. Recorders of before may have ended a text early, or have sent
    reasoning as content.
    """
    given = Reply.of_message({"content": "", **message}, None)
    if not given.tool_calls:
        calls_as_text(sampled)
    calls = [[(call.name, parse_arguments(call.arguments)) for call in reply.tool_calls] for reply in (given, sampled)]
    reasoning, content = ("".join(text.split()) for text in (sampled.reasoning, sampled.content))
    texts = ("".join(text.split()) for text in (given.reasoning, given.content))
    begun = all(any(whole.startswith(text) for whole in (content, reasoning + content)) for text in texts)
    return calls[0] == calls[1] and begun
