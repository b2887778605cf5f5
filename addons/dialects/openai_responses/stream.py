"""Streamed replies of the Responses API: server-sent events with their `type` in the data."""

from dataclasses import replace
from typing import Any, NamedTuple

from rolltap.addons.dialects import dialect
from rolltap.addons.dialects.call import ContextOverflow, DialectError, Reply, ReplyContext, Usage
from rolltap.addons.dialects.json_values import Object
from rolltap.addons.dialects.openai_responses.reply import (
    ending,
    is_compaction,
    message_item,
    output_items,
    reasoning_item,
    response,
)


class _Form(NamedTuple):
    """Form of the text of one type of item. It is a field of the item, or of its only part."""

    event: str
    """Name of the text's events, without `.delta` and `.done`."""
    key: str
    """Name of the text's field."""
    part_event: str = ""
    """Name of the part's events, without `.added` and `.done`."""
    parts_key: str = ""
    """Name of the item's list of parts."""

    def holder(self, item: Object) -> Object:
        """Return the object with the text."""
        holder: Object = item[self.parts_key][0] if self.parts_key else item
        return holder

    def emptied(self, item: Object) -> Object:
        """Return an item without its text, as its first event has it."""
        empty = dict(item)
        empty[self.parts_key or self.key] = [] if self.parts_key else ""
        if "status" in item:
            empty["status"] = "in_progress"
        return empty


_FORMS = {
    "reasoning": _Form("reasoning_summary_text", "text", "reasoning_summary_part", "summary"),
    "message": _Form("output_text", "text", "content_part", "content"),
    "function_call": _Form("function_call_arguments", "arguments"),
    "custom_tool_call": _Form("custom_tool_call_input", "input"),
}


class StreamEncoder(dialect.StreamEncoder):
    """Encoder of one streamed reply. Each item is complete before the next one begins."""

    def __init__(self, context: ReplyContext) -> None:
        super().__init__(context)
        self._num_events = 0
        self._done: list[Object] = []
        self._open: Object | None = None
        """The item that grows, as it began."""
        self._texts: list[str] = []
        """Its text so far."""

    def start(self) -> bytes:
        return self._response("in_progress", "created") + self.keep_alive()

    def delta(self, reasoning: str, content: str) -> bytes:
        """Return the events of new text, reasoning before content.

        Reasoning after the first content is not sent. The summary of a compaction is sent by
        `finish`. The stream is kept alive in the place of both.
        """
        if is_compaction(self._context):
            return self.keep_alive()
        events = b""
        if reasoning and (self._done or self._is_open("message")):
            events += self.keep_alive()
        elif reasoning:
            events += self._grow(reasoning_item(self._context, reasoning))
        if content and self._is_open("reasoning"):
            text = "".join(self._texts)
            events += self._close(reasoning_item(self._context, text))
        if content:
            index = len(self._done)
            events += self._grow(message_item(self._context, index, content, "in_progress"))
        return events

    def keep_alive(self) -> bytes:
        """Return an event that Codex parses, because its idle timer ignores SSE comments."""
        return self._response("in_progress")

    def finish(self, reply: Reply, usage: Usage) -> bytes:
        if self._is_open("message") and not self._done:
            reply = replace(reply, reasoning="")  # it came after the content
        events = b""
        items = output_items(self._context, reply)
        for item in items[len(self._done) :]:
            if self._open is None:
                events += self._grow(item)
            events += self._close(item)
        fields = ending(self._context, reply, usage)
        return events + self._response(output=self._done, **fields)

    def error(self, error: DialectError) -> bytes:
        failure = {"code": _failure_code(error), "message": str(error)}
        return self._response("failed", output=self._done, error=failure)

    def _is_open(self, kind: str) -> bool:
        return self._open is not None and self._open["type"] == kind

    def _grow(self, item: Object) -> bytes:
        """Add the text of `item` to the open item. Without one, `item` becomes the open item."""
        form = _FORMS.get(item["type"])
        events = b""
        if self._open is None:
            self._open = item
            self._texts = []
            begun = form.emptied(item) if form else item
            events += self._event("output_item.added", item=begun)
            if form and form.part_event:
                part = {**form.holder(item), form.key: ""}
                events += self._text_event(form, f"{form.part_event}.added", part=part)
        if form and (new := form.holder(item)[form.key]):
            self._texts.append(new)
            events += self._text_event(form, f"{form.event}.delta", delta=new)
        return events

    def _close(self, item: Object) -> bytes:
        """Complete the open item. `item` is the whole of it."""
        form = _FORMS.get(item["type"])
        events = b""
        if form:
            part = form.holder(item)
            fields = {form.key: part[form.key]}
            if item["type"] == "function_call":
                fields["name"] = item["name"]
            events += self._text_event(form, f"{form.event}.done", **fields)
            if form.part_event:
                events += self._text_event(form, f"{form.part_event}.done", part=part)
        events += self._event("output_item.done", item=item)
        self._done.append(item)
        self._open = None
        return events

    def _response(
        self,
        status: str,
        kind: str = "",
        **fields: Any,
    ) -> bytes:
        """Return an event with the response, whose kind is the status or another one."""
        whole = response(self._context, status, **fields)
        return self._event(kind or status, response=whole)

    def _text_event(self, form: _Form, kind: str, **fields: Any) -> bytes:
        """Return an event of the open item's text."""
        assert self._open is not None
        if form.parts_key:
            fields[f"{form.parts_key}_index"] = 0
        if kind.startswith("output_text"):
            fields["logprobs"] = []
        return self._event(kind, item_id=self._open["id"], **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {
            "type": f"response.{kind}",
            "sequence_number": self._num_events,
            **fields,
        }
        if "response" not in fields:
            data["output_index"] = len(self._done)
        self._num_events += 1
        return dialect.server_event(data)


def _failure_code(error: DialectError) -> str:
    # Codex ends its run on context_length_exceeded and invalid_prompt, and retries on server_error
    if isinstance(error, ContextOverflow):
        return error.code
    return "invalid_prompt" if error.status < 500 else "server_error"
