"""Streamed replies of the Responses API. The data of each event is one line of JSON with the event's `type`."""

from dataclasses import dataclass, field
from typing import Any

from rolltap.addons.dialects import dialect
from rolltap.addons.dialects.call import ContextOverflow, DialectError, Reply, ReplyContext, Usage, dump_json
from rolltap.addons.dialects.openai_responses.reply import (
    ending,
    is_compaction,
    message_item,
    output_items,
    reasoning_item,
    response,
)

_Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Text:
    """The events and fields that carry the text of one type of item. It is a field of the item, or of its only part."""

    event: str
    """Name of the text's events, without `.delta` and `.done`."""
    key: str
    """Name of the text's field."""
    part_event: str = ""
    """Name of the part's events, without `.added` and `.done`."""
    parts_key: str = ""
    """Name of the item's list of parts."""
    part_index: dict[str, int] = field(default_factory=dict)
    extra: dict[str, list[Any]] = field(default_factory=dict)
    """Further fields of the text's events."""


_TEXTS = {
    "reasoning": _Text(
        "response.reasoning_summary_text", "text", "response.reasoning_summary_part", "summary", {"summary_index": 0}
    ),
    "message": _Text(
        "response.output_text", "text", "response.content_part", "content", {"content_index": 0}, {"logprobs": []}
    ),
    "function_call": _Text("response.function_call_arguments", "arguments"),
    "custom_tool_call": _Text("response.custom_tool_call_input", "input"),
}


class StreamEncoder(dialect.StreamEncoder):
    """Encoder of one streamed reply as server-sent events. Each item is complete before the next one begins."""

    def __init__(self, context: ReplyContext) -> None:
        super().__init__(context)
        self._num_events = 0
        self._done: list[_Item] = []
        self._open: _Item | None = None
        """The item that grows, as it began."""
        self._texts: list[str] = []
        """Its text so far."""

    def start(self) -> bytes:
        """Return the first events of the response."""
        return self._response("response.created", status="in_progress") + self.keep_alive()

    def delta(self, reasoning: str, content: str) -> bytes:
        """Return the events of new text, reasoning before content.

        Reasoning after the first content is not sent. The summary of a compaction is sent by `finish`. The stream is
        kept alive in the place of both.
        """
        if is_compaction(self._context):
            return self.keep_alive()
        events = []
        if reasoning and (self._done or self._is_open("message")):
            events.append(self.keep_alive())
        elif reasoning:
            events.append(self._grow(reasoning_item(self._context, reasoning)))
        if content and self._is_open("reasoning"):
            events.append(self._close(reasoning_item(self._context, "".join(self._texts))))
        if content:
            events.append(self._grow(message_item(self._context, len(self._done), content, "in_progress")))
        return b"".join(events)

    def keep_alive(self) -> bytes:
        """Return an event that Codex parses, because its idle timer ignores SSE comments."""
        return self._response("response.in_progress", status="in_progress")

    def finish(self, reply: Reply, usage: Usage) -> bytes:
        """Return the events of the remaining items and of the end."""
        events = []
        for item in output_items(self._context, reply)[len(self._done) :]:
            if self._open is None:
                events.append(self._grow(item))
            events.append(self._close(item))
        fields = ending(self._context, reply, usage)
        events.append(self._response(f"response.{fields['status']}", **fields, output=self._done))
        return b"".join(events)

    def error(self, error: DialectError) -> bytes:
        """Return the event of a failure after `start`."""
        failure = {"code": _failure_code(error), "message": str(error)}
        return self._response("response.failed", status="failed", output=self._done, error=failure)

    def _is_open(self, kind: str) -> bool:
        return self._open is not None and self._open["type"] == kind

    def _grow(self, item: _Item) -> bytes:
        """Return the events that add the text of `item` to the open item. Without one, `item` becomes the open item."""
        text = _TEXTS.get(item["type"])
        events = []
        if self._open is None:
            self._open = item
            self._texts = []
            events.append(self._event("response.output_item.added", item=_emptied(item)))
            if text and text.part_event:
                part = {**_holder(item, text), text.key: ""}
                events.append(self._item_event(f"{text.part_event}.added", **text.part_index, part=part))
        if text and (new := _holder(item, text)[text.key]):
            self._texts.append(new)
            events.append(self._item_event(f"{text.event}.delta", **text.part_index, **text.extra, delta=new))
        return b"".join(events)

    def _close(self, item: _Item) -> bytes:
        """Return the events that complete the open item. `item` is the whole of it."""
        text = _TEXTS.get(item["type"])
        events = []
        if text:
            fields = {**text.part_index, **text.extra, text.key: _holder(item, text)[text.key]}
            if item["type"] == "function_call":
                fields["name"] = item["name"]
            events.append(self._item_event(f"{text.event}.done", **fields))
            if text.part_event:
                part = _holder(item, text)
                events.append(self._item_event(f"{text.part_event}.done", **text.part_index, part=part))
        events.append(self._event("response.output_item.done", item=item))
        self._done.append(item)
        self._open = None
        return b"".join(events)

    def _response(self, kind: str, *, status: str, output: list[_Item] | None = None, **fields: Any) -> bytes:
        return self._event(kind, response=response(self._context, status=status, output=output or [], **fields))

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        """Return an event of the open item."""
        assert self._open is not None
        return self._event(kind, item_id=self._open["id"], **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        if "response" not in fields:
            fields["output_index"] = len(self._done)
        data = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return f"event: {kind}\n".encode() + b"data: " + dump_json(data) + b"\n\n"


def _holder(item: _Item, text: _Text) -> dict[str, Any]:
    """Return the object with an item's text: the item itself or its only part."""
    holder: dict[str, Any] = item[text.parts_key][0] if text.parts_key else item
    return holder


def _emptied(item: _Item) -> _Item:
    """Return an item without its text, as its first event contains it."""
    text = _TEXTS.get(item["type"])
    if text is None:
        return item
    started = {**item, text.parts_key: []} if text.parts_key else {**item, text.key: ""}
    return {**started, "status": "in_progress"} if "status" in item else started


def _failure_code(error: DialectError) -> str:
    # Codex ends its run on context_length_exceeded and invalid_prompt, and retries on server_error
    if isinstance(error, ContextOverflow):
        return error.code
    return "invalid_prompt" if error.status < 500 else "server_error"
