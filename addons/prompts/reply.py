"""The reply in sampled tokens, parsed once, as they are sampled: reasoning, content, tool calls.

    tokens --TokenTexts--> text --MarkScanner--> parts --ReplyParser--> new text, and the reply

Text that later tokens may change is held back: the beginning of a mark or of a stop text, and white
space, which may be the end of a field. What was returned never changes. The work is O(number of new
tokens), whatever is sampled.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from rolltap.addons.dialects.call import Message, ModelCall, Reply, Tool
from rolltap.addons.dialects.json_values import parse_arguments
from rolltap.addons.dialects.tools import calls_as_text
from rolltap.addons.prompts.families import UNREADABLE, Family
from rolltap.addons.prompts.tokenizer import TokenTexts

LONGEST_MARK = 1024
"""Characters. Longer text that may be the beginning of a mark is no mark."""
_PIECE = 1024
"""Characters that are searched together."""
_BEFORE = "\0"
"""A character in place of the text before: the held text does not begin the reply."""

NewText = tuple[str, str]
"""New reasoning and new content of a reply. No reasoning comes after the first content."""


class Part(NamedTuple):
    """A mark that opens or closes a field, or text of a field: None outside of all fields."""

    kind: Literal["open", "text", "close"]
    field: str | None
    text: str


class MarkScanner:
    """Cuts a text into parts while it grows. `template` is a `ResponseTemplate` of transformers.

    The parts are those of transformers' `ResponseParser`, which keeps and copies the whole text,
    and searches all of a piece again after each mark: its work is quadratic in the text. Here no
    more text is held than a mark may have.
    """

    def __init__(self, template: Any) -> None:
        self._fields = template.fields
        self._implicit: str | None = template.implicit
        self._field = self._implicit
        """The field that the text is in."""
        self._held = ""
        self._begin = 0
        """Index of the first held character: 1 behind `_BEFORE`."""

    def feed(self, text: str) -> Iterator[Part]:
        """Yield the parts that later text cannot change."""
        for start in range(0, len(text), _PIECE):
            self._held += text[start : start + _PIECE]
            yield from self._scan(last=False)

    def finish(self) -> Iterator[Part]:
        """Yield the parts that were held back."""
        yield from self._scan(last=True)

    def _scan(self, *, last: bool) -> Iterator[Part]:
        while True:
            mark, end = self._next_mark(last)
            too_long = mark is None and len(self._held) - end >= LONGEST_MARK
            if too_long:
                end += 1
            if end > self._begin:
                yield Part("text", self._field, self._take(end))
            if too_long:
                continue
            if mark is None:
                return
            self._take(self._begin + len(mark.text))
            self._field = mark.field
            yield mark
            if mark.kind == "close":
                self._field = self._implicit

    def _next_mark(self, last: bool) -> tuple[Part | None, int]:
        """Return the first mark, and the end of the text before it or before a possible mark."""
        marks = []
        safe = len(self._held)
        for kind, name, pattern in self._watched():
            found = pattern.search(self._held, self._begin, partial=not last)
            if found is None:
                continue
            start, end = found.span()
            closes = kind == "close"
            if closes and name == self._implicit and start == end and not found.partial:
                continue  # it closes nothing: the implicit field goes on
            if not last and (found.partial or end == len(self._held)):
                safe = min(safe, start)  # later text may make it longer
            else:
                # the first one, the longest of those at one place
                marks.append((start, -end, closes, Part(kind, name, found.group())))
        if marks:
            start, _, _, mark = min(marks)
            if start <= safe:
                return mark, start
        return None, safe

    def _watched(self) -> Iterator[tuple[Literal["open", "close"], str, Any]]:
        """Yield the marks that may come next: whether they open or close, the field, a pattern."""
        for name, field in self._fields.items():
            if self._field == self._implicit and field.open_re is not None:
                yield "open", name, field.open_re
            if self._field == name and field.close_re is not None:
                yield "close", name, field.close_re

    def _take(self, end: int) -> str:
        """Return the held text up to `end`, and forget it."""
        text = self._held[self._begin : end]
        if text:
            self._held = _BEFORE + self._held[end:]
            self._begin = 1
        return text


class FieldText:
    """A text of a reply while it grows: without white space at its ends, up to the first stop text.

    As in vLLM, one character less than the longest stop text is held back.
    """

    def __init__(self, stop_texts: Sequence[str]) -> None:
        self._stop_texts = stop_texts
        self._num_held = max(map(len, stop_texts), default=1) - 1
        self._final: list[str] = []
        self._num_taken = 0
        """Number of the final texts that were taken."""
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
        """All text that is final."""
        return "".join(self._final)

    def add(self, text: str) -> None:
        """Append text."""
        if not self.begun:
            text = text.lstrip()
        inner = text.rstrip()
        if inner:
            self.begun = True
            self._held += "".join(self._space) + inner
            self._space.clear()
        self._space.append(text[len(inner) :])
        self._release(self._num_held)

    def finish(self) -> None:
        """Make the rest of the text final."""
        self._release(0)

    def take(self) -> str:
        """Return the text that is final and was not taken before."""
        new = self._final[self._num_taken :]
        self._num_taken = len(self._final)
        return "".join(new)

    def _release(self, num_held: int) -> None:
        if self.stop is not None:
            return
        end = max(0, len(self._held) - num_held)
        for stop_text in self._stop_texts:
            place = self._held.find(stop_text)
            if place >= 0 and (self.stop is None or (place, stop_text) < (end, self.stop)):
                end = place
                self.stop = stop_text
        self._final.append(self._held[:end])
        self._held = self._held[end:]


class ReplyParser:
    """The reply to a call in a text that grows after a prompt. `feed` it, then `finish` it once.

    A tool call that cannot be read, or has not ended, is part of the content, and `Reply.unread`
    says why. If the call has a grammar, reasoning that does not end is content: a prompt may have
    opened it before the JSON. Unless it may call, tool calls are lines of JSON in the content.
    """

    def __init__(self, family: Family, prompt_end: str, model_call: ModelCall) -> None:
        self._family = family
        self._model_call = model_call
        self._scanner = MarkScanner(family.template)
        begun = ""
        if family.template.start_anchor_re.search(prompt_end) is not None:
            # the beginning of the reply that the prompt has written
            begun = family.template.truncate_past_last_anchor(prompt_end)
        self._place = -len(begun)
        """Number of characters before the next part, from the end of the prompt on."""
        for part in self._scanner.feed(begun):
            self._place += len(part.text)
        self._reply = Reply()
        self._reasoning = FieldText(model_call.stop)
        self._content = FieldText(model_call.stop)
        self._call: list[str] = []
        """Texts of the open tool call, first its mark."""
        self._outside: list[str] = []
        """Texts outside of all fields, of a family that marks its content."""
        self._undecided: list[str] | None = None
        """Reasoning that may be content; None when no reasoning may."""
        if model_call.grammar is not None:
            self._undecided = []
        self.reasoning_spans = [[0, 0]]
        """Begin and end of each part of the reasoning, with its mark, in characters of the text."""

    def feed(self, text: str) -> NewText:
        """Return what is final of the reply now, and was not before."""
        self._add(self._scanner.feed(text))
        return self._reasoning.take(), self._content.take()

    def finish(self, text: str = "", end: str = "") -> tuple[Reply, NewText]:
        """Return the reply, and what `feed` has not returned of it.

        `text` is the last of its text, and `end` that of the token that ends the turn, which may be
        a mark, and is no text of the reply.
        """
        self._add(self._scanner.feed(text))
        parts = [*self._scanner.feed(end), *self._scanner.finish()]
        if parts and parts[-1].kind == "text":
            last = parts[-1]
            parts[-1] = last._replace(text=last.text.removesuffix(end))
        self._add(parts)
        if self._stop is None:
            self._end()
        reply = self._reply
        reply.stop = self._stop
        if reply.stop is not None:
            reply.tool_calls = []
        reply.reasoning = self._reasoning.text
        reply.content = self._content.text
        new_content = self._content.take()
        if not self._model_call.may_call:
            before = len(reply.content)
            calls_as_text(reply)
            new_content += reply.content[before:]
        return reply, (self._reasoning.take(), new_content)

    @property
    def _stop(self) -> str | None:
        """The stop text that has ended the reply."""
        return self._reasoning.stop or self._content.stop

    def _end(self) -> None:
        """Decide about all texts that are left."""
        if self._call:
            self._reply.unread = "the call has not ended"
            self._add_content("".join(self._call))
        if self._undecided:
            self.reasoning_spans.clear()
            self._add_content("".join(self._undecided))
        if not (self._reasoning.begun or self._content.begun or self._reply.tool_calls):
            self._add_content("".join(self._outside))
        self._reasoning.finish()
        self._content.finish()

    def _add(self, parts: Iterable[Part]) -> None:
        for part in parts:
            if self._stop is None:
                self._add_part(part)
            self._place += len(part.text)

    def _add_part(self, part: Part) -> None:
        match part.field, part.kind:
            case "tool_calls", "close":
                self._add_call(part.text)
            case "tool_calls", _:
                self._call.append(part.text)
            case None, _:
                self._outside.append(part.text)
            case "content", "text":
                self._add_content(part.text)
            case "content", _:
                pass
            case _, "open":
                self.reasoning_spans.append([self._place, self._place])
                if self._reasoning.begun:
                    self._reasoning.add("\n\n")
            case _, "text":
                inner = part.text.rstrip()
                if inner:
                    self.reasoning_spans[-1][1] = self._place + len(inner)
                if self._undecided is None:
                    self._add_reasoning(part.text)
                else:
                    self._undecided.append(part.text)
            case _, "close" if self._undecided is not None:
                self._add_reasoning("".join(self._undecided))
                self._undecided = None

    def _add_reasoning(self, text: str) -> None:
        if not self._content.begun:
            self._reasoning.add(text)

    def _add_content(self, text: str) -> None:
        self._content.add(text)
        if self._content.begun:
            self._reasoning.finish()

    def _add_call(self, closing: str) -> None:
        opening, *texts = self._call
        content = "".join(texts)
        self._call = []
        try:
            calls = self._family.read_calls(opening, content, closing, self._model_call.tools)
            self._reply.tool_calls += calls
        except UNREADABLE as error:
            reason = str(error) or type(error).__name__
            self._reply.unread = f"the call cannot be read: {reason}"
            self._add_content(opening + content + closing)


class SampledReply:
    """The reply in the tokens of one call. `feed` it while they are sampled, then `finish` it once.

    `decode` returns the text of tokens, and `stop_ids` end a turn.
    """

    def __init__(
        self,
        parser: ReplyParser,
        decode: Callable[[list[int]], str],
        stop_ids: Iterable[int],
    ) -> None:
        self._parser = parser
        self._decode = decode
        self._stop_ids = frozenset(stop_ids)
        self._texts = TokenTexts(decode)
        self._ending: list[int] = []
        """The newest token, if it ends the turn unless another one follows."""
        self._lengths = array("Q", [0])
        """Number of characters up to each token."""

    def feed(self, token_ids: Iterable[int]) -> NewText:
        """Return the new text of the reply after new tokens."""
        ids = [*self._ending, *token_ids]
        self._ending = []
        if ids and ids[-1] in self._stop_ids:
            self._ending.append(ids.pop())
        texts = []
        for token_id in ids:
            text = self._texts.add(token_id)
            texts.append(text)
            self._lengths.append(self._lengths[-1] + len(text))
        return self._parser.feed("".join(texts))

    def finish(self) -> tuple[Reply, NewText]:
        """Return the reply, and its text that `feed` has not returned."""
        return self._parser.finish(self._texts.finish(), self._decode(self._ending))

    @property
    def reasoning_tokens(self) -> int:
        """The number of tokens of the reasoning with the marks before it."""
        count = 0
        for begin, end in self._parser.reasoning_spans:
            count += self._tokens_up_to(end) - self._tokens_up_to(begin)
        return count

    def _tokens_up_to(self, length: int) -> int:
        return min(bisect_left(self._lengths, length), len(self._lengths) - 1)


def read_text(
    family: Family,
    prompt_end: str,
    text: str,
    tools: Sequence[Tool],
) -> Reply:
    """Return the reply in a whole `text`, which follows a prompt that ends with `prompt_end`."""
    reply, _ = ReplyParser(family, prompt_end, ModelCall("", [], [*tools])).finish(text)
    return reply


def is_sampled(message: Message, sampled: Reply) -> bool:
    """Return True when a recorded reply is what its tokens say, which is `sampled`.

    Its tool calls are theirs, and its texts begin theirs. Recorders of before may have ended a text
    early, or have sent reasoning as content. Changes `sampled`.
    """
    given = Reply.of_message({"content": "", **message}, None)
    if not given.tool_calls:
        calls_as_text(sampled)
    if _functions(given) != _functions(sampled):
        return False
    content = _letters(sampled.content)
    reasoning = _letters(sampled.reasoning)
    for text in (_letters(given.reasoning), _letters(given.content)):
        if not content.startswith(text) and not (reasoning + content).startswith(text):
            return False
    return True


def _functions(reply: Reply) -> list[tuple[str, Any]]:
    return [(call.name, parse_arguments(call.arguments)) for call in reply.tool_calls]


def _letters(text: str) -> str:
    return "".join(text.split())
