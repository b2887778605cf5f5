"""Requests of the OpenAI Responses API, which Codex, Pi, opencode and the OpenAI SDKs use.

Field names follow the OpenAI API reference. Its peculiarities:

| on the wire | here |
| --- | --- |
| one reply is several items: reasoning, message, calls | consecutive ones are one message |
| tools have namespaces | a namespace is a prefix of the name: see `_shown_names` |
| tools may stand among the items: `additional_tools` | they are tools of the request |
| `previous_response_id`, `item_reference` | messages and items of earlier replies: see `stored` |
| a `compaction_trigger`, or the path `/responses/compact` | the model is asked for a summary |
| results of calls that a compaction stands for | no error |
| `/v1/models` belongs to Chat Completions | Codex has its own path for its catalogue of models |
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rolltap.addons.dialects import dialect
from rolltap.addons.dialects.call import (
    FREEFORM_ARGUMENT,
    DialectError,
    Message,
    ModelCall,
    Part,
    Reply,
    ReplyContext,
    ServedModel,
    Tool,
    Usage,
    WireTool,
    assistant_message,
    message_tool_call,
    signed_call,
)
from rolltap.addons.dialects.fields import Fields
from rolltap.addons.dialects.json_values import Object, described, dump_json, parse_arguments
from rolltap.addons.dialects.openai_chat import (
    WORDING,
    OpenAIDialect,
    read_content,
    read_texts,
    refuse_unsupported,
    require_offered,
    wanted_schema,
)
from rolltap.addons.dialects.openai_responses import reply, stored
from rolltap.addons.dialects.openai_responses.stream import StreamEncoder
from rolltap.addons.dialects.tools import freeform_tool, function_tool

_ROLES = ("system", "developer", "user", "assistant")
_RECORDED_OPTIONS = [
    "temperature",
    "top_p",
    "reasoning",
    "text",
    "tool_choice",
    "parallel_tool_calls",
    "service_tier",
    "truncation",
    "presence_penalty",
    "frequency_penalty",
    "store",
    "include",
    "max_tool_calls",
    "context_management",
]
"""Options that the row keeps (`Call.sampling`, key `asked`), part of the `request_digest`. `decode`
also reads those of them that are applied."""
_NOT_STORED = {
    "conversation": "name the last response as 'previous_response_id'",
    "prompt": "this server stores no templates",
    "background": "this server stores no unread replies",
}
"""Fields that are refused, and the reason."""
_LOGPROBS = "message.output_text.logprobs"
_ORPHAN = "No tool call found for function call output with call_id {}."
_LONGEST_REPEATED = 512 * 1024
"""Bytes of a field that the response repeats: no longer one is encoded in the event loop."""

_Offered = dict[tuple[str, str], tuple[Tool, WireTool]]
"""Namespace or "", and name -> the tool, and its form on the wire."""


class OpenAIResponses(OpenAIDialect):
    """The Responses API over HTTP."""

    NAME = "openai-responses"
    CONVERSATION = "input"
    GENERATE = ("/v1/responses", "/responses", "/v1/responses/compact", "/responses/compact")
    COUNT_TOKENS = ("/v1/responses/input_tokens", "/responses/input_tokens")
    MODELS = "/backend-api/codex/models"

    def decode(
        self,
        request: Object,
        target: str,
        known: Sequence[Part] = (),
    ) -> ModelCall:
        fields = Fields(request, WORDING)
        items = fields.maybe("input", list) or []
        if fields["previous_response_id"] is None and not any(map(stored.is_reference, items)):
            return _decode(fields, target, known)
        raise stored.NeedsStoredState(partial(_decode_naming, fields, target, known))

    def encode_reply(
        self,
        context: ReplyContext,
        sampled: Reply,
        usage: Usage,
    ) -> bytes:
        fields = reply.ending(context, sampled, usage)
        output = reply.output_items(context, sampled)
        whole = reply.response(context, output=output, **fields)
        if not reply.is_compact(context.target):
            return dump_json(whole)
        kept = {key: whole[key] for key in ("id", "created_at", "output", "usage")}
        return dump_json({**kept, "object": "response.compaction"})

    def stream_encoder(self, context: ReplyContext) -> dialect.StreamEncoder:
        return StreamEncoder(context)

    def encode_token_count(self, num_tokens: int) -> bytes:
        return dump_json({"object": "response.input_tokens", "input_tokens": num_tokens})

    def model_entry(self, model: ServedModel, created: int) -> Object:
        return reply.catalogue_entry(model)

    def model_list(self, entries: list[Object]) -> Object:
        for priority, entry in enumerate(entries):
            entry["priority"] = priority
        return {"models": entries}


def _decode_naming(
    fields: Fields,
    target: str,
    known: Sequence[Part],
    find: stored.FindCall,
) -> ModelCall:
    """Decode a request that names replies by their ids."""
    before = stored.previous_messages(fields, find)
    call = _decode(stored.with_items(fields, find), target, known, before)
    call.parts = []  # the bytes of a reference are not those of its item
    return call


def _decode(
    fields: Fields,
    target: str,
    known: Sequence[Part],
    before: Sequence[Message] = (),
) -> ModelCall:
    """Decode a request. The messages `before` its input are not in it."""
    _refuse_options(fields)
    is_compaction = reply.is_compact(target)
    if is_compaction:
        fields.label("model")
    if not fields["input"] and not before:
        raise fields.refusal("input", "a non-empty string or list of items")
    text = fields.maybe("input", str)
    if text is not None:
        message = {"role": "user", "content": text}
        fields = fields.replaced({**fields.values, "input": [message]})
    parts = dialect.decode_parts(fields, "input", known, _part)
    offered: _Offered = {}
    hosted: list[Any] = []
    _read_tools(fields, offered, hosted)
    for index, part in enumerate(parts):
        if part.element is None:
            continue
        item = fields.element("input", index, part.element)
        if item["type"] == "additional_tools":
            _read_tools(item, offered, hosted)
        elif part is not parts[-1]:
            why = "is a compaction trigger, which must be the last item"
            raise DialectError(f"'{item.place()}' {why}.")
        else:
            is_compaction = True
    names = _shown_names(offered)
    parts = _with_shown_names(parts, names)
    earlier, *parts = _named([Part([*before]), *parts])
    said = [part for part in parts if part.messages]
    messages = _instructions(fields) + earlier.messages + dialect.join_turns(said, "\n\n")
    if not messages:
        raise DialectError("'input' must hold at least one message.")
    form = fields.inner("text").inner("format")
    metadata = fields.inner("client_metadata")
    call = ModelCall(
        model=fields.label("model", ""),
        messages=messages,
        tools=[],
        stream=fields["stream"] is True and not reply.is_compact(target),
        max_tokens=fields.optional("max_output_tokens", Fields.positive_integer),
        schema=wanted_schema(form, form),
        may_call=fields["tool_choice"] != "none",
        requested_sampling=fields.chosen(_RECORDED_OPTIONS),
        hosted_tools=hosted,
        client_metadata=metadata.texts_by_place(*metadata.values),
        repeated=_repeated(fields),
    )
    for key, (tool, wire) in offered.items():
        name = names[key]
        tool["function"]["name"] = name
        call.tools.append(tool)
        if wire != WireTool(name):
            call.wire_tools[name] = wire
    call.client_metadata |= fields.texts_by_place("prompt_cache_key", "previous_response_id")
    if fields["instructions"] is not None:
        call.requested_sampling[stored.INSTRUCTIONS] = True
    if is_compaction:
        reply.ask_for_summary(call)
    require_offered(fields.inner("tool_choice"), call.tool_names)
    return dialect.decoded(call, parts)


def _refuse_options(fields: Fields) -> None:
    for name, why in _NOT_STORED.items():
        if fields[name]:
            raise DialectError(f"'{name}' is not supported: {why}.")
    refuse_unsupported(fields, ["top_logprobs"])
    if _LOGPROBS in fields.elements("include"):
        expected = f"a list without '{_LOGPROBS}', which is not supported with this model"
        raise fields.refusal("include", expected)


def _repeated(fields: Fields) -> Object:
    """Return the fields that the response repeats. The window bounds the first two."""
    repeated = fields.chosen(("instructions", "tools"))
    for key, value in fields.chosen(reply.REPEATED).items():
        if len(dump_json(value)) <= _LONGEST_REPEATED:
            repeated[key] = value
    return repeated


def _instructions(fields: Fields) -> list[Message]:
    text = fields.optional("instructions", Fields.text)
    if text is None:
        return []
    return [{"role": "system", "content": text}]


def _named(parts: list[Part]) -> list[Part]:
    orphan = _ORPHAN
    if any(map(reply.is_summary, dialect.all_messages(parts))):
        orphan = ""  # it may stand for the call of a result
    return dialect.name_parts(parts, orphan)


def _part(item: Fields) -> Part:
    """Return the part of an item. Items of the assistant become a message each: see `join_turns`.

    The part of an item with tools, and of a compaction trigger, has the item and no message.
    """
    part = Part()
    kind = item.text("type", "message")
    match kind:
        case "message":
            role = item.choice("role", _ROLES)
            if role == "developer":
                role = "system"
            message = {"role": role, "content": read_content(item, "content", part)}
        case "reasoning":
            texts = filter(None, read_texts(item, "summary", part))
            call_id = signed_call(item["encrypted_content"])
            message = assistant_message("", "\n\n".join(texts), [], call_id)
        case "function_call":
            arguments = parse_arguments(item.text("arguments"))
            message = _call_message(item, arguments, part)
        case "custom_tool_call":
            arguments = {FREEFORM_ARGUMENT: item.text("input")}
            message = _call_message(item, arguments, part)
        case "function_call_output" | "custom_tool_call_output":
            content = read_content(item, "output", part)
            call_id = item.identifier("call_id")
            message = {
                "role": "tool",
                "content": content,
                "tool_call_id": call_id,
            }
        case "compaction":
            message = reply.summary_message(item)
        case "additional_tools" | "compaction_trigger":
            part.element = item.values
            return part
        case _:
            why = f"has type {described(kind)}, which this model neither issues nor reads"
            raise DialectError(f"'{item.place()}' {why}.")
    part.messages.append(message)
    return part


def _call_message(
    item: Fields,
    arguments: Any,
    part: Part,
) -> Message:
    namespace = item.text("namespace", "")
    name = item.text("name")
    if namespace:
        part.tool = (namespace, name)
        name = f"{namespace}__{name}"
    call = message_tool_call(item.identifier("call_id"), name, arguments)
    return assistant_message("", "", [call])


def _shown_names(offered: _Offered) -> dict[tuple[str, str], str]:
    """Return the names of the tools that the model sees. It has no namespaces.

    A namespace is a prefix of the name. A number tells it from a tool which has that name already.
    """
    names: dict[tuple[str, str], str] = {}
    taken = {name for namespace, name in offered if not namespace}
    numbers: Counter[str] = Counter()
    for namespace, name in offered:
        shown = name
        if namespace:
            prefixed = f"{namespace}__{name}"
            shown = prefixed
            while shown in taken:
                numbers[prefixed] += 1
                shown = f"{prefixed}_{numbers[prefixed]}"
            taken.add(shown)
        names[namespace, name] = shown
    return names


def _with_shown_names(
    parts: list[Part],
    names: dict[tuple[str, str], str],
) -> list[Part]:
    """Return the parts with the names that the model sees in calls of tools in namespaces.

    No part is changed: another request may have other tools. A tool that is not offered has its
    plain name.
    """
    whole: list[Part] = []
    renamed = False
    for part in parts:
        if part.tool is not None:
            namespace, name = part.tool
            shown = names.get(part.tool, f"{namespace}__{name}")
            (message,) = part.messages
            (call,) = message["tool_calls"]
            function = call["function"]
            if function["name"] != shown:
                renamed = True
                call = message_tool_call(call["id"], shown, function["arguments"])
                part = replace(part, messages=[{**message, "tool_calls": [call]}])
        if renamed:  # the turns after it may be made of it
            part = replace(part, turn=None)
        whole.append(part)
    return whole


def _read_tools(
    fields: Fields,
    offered: _Offered,
    hosted: list[Any],
) -> None:
    """Add the list `tools` of a request or an item.

    A tool replaces an earlier one with the same name and namespace. Raises `DialectError`.
    """
    for tool in fields.objects("tools"):
        kind = tool.text("type")
        if kind == "namespace":
            namespace = tool.tool_name("name")
            for inner in tool.objects("tools"):
                _add_tool(inner, namespace, offered)
        elif kind in ("function", "custom"):
            _add_tool(tool, "", offered)
        else:
            hosted.append(tool.values)


def _add_tool(
    tool: Fields,
    namespace: str,
    offered: _Offered,
) -> None:
    is_freeform = tool.choice("type", ("function", "custom")) == "custom"
    name = tool.tool_name("name")
    description = tool.maybe("description", str)
    if is_freeform:
        grammar = tool.inner("format").maybe("definition", str)
        function = freeform_tool(name, description, grammar)
    else:
        function = function_tool(name, description, tool.maybe("parameters", dict))
    wire = WireTool(name, namespace or None, is_freeform)
    offered[namespace, name] = function, wire
