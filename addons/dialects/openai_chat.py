"""OpenAI Chat Completions, which the OpenAI SDKs, LiteLLM and most harnesses use.

The Responses API took over its errors, the parts of its contents and the formats of its replies:
that API reads them with the functions here (`OpenAIDialect` to `wanted_schema`).

Field names follow the OpenAI API reference. Its peculiarities:

| on the wire | here |
| --- | --- |
| `reasoning_content`, or `reasoning`: extensions of servers of reasoning models | the reasoning |
| a message of the role `developer` | a system message |
| a `custom` tool takes free text | a function with one text: see `tools.freeform_tool` |
| the arguments of an echoed call are a text, an object or absent | parsed; a text if no JSON |
| Qwen Code's idle timer ignores SSE comments | an empty delta keeps a stream open |
| Qwen Code retries a broken stream only if its `code` is 5xx | the `code` is the HTTP status |
"""

from collections.abc import Collection, Iterable, Sequence

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
    Usage,
    WireTool,
    assistant_message,
    message_tool_call,
)
from rolltap.addons.dialects.fields import Fields, Wording
from rolltap.addons.dialects.json_values import Object, described, dump_json, parse_arguments
from rolltap.addons.dialects.tools import freeform_input, freeform_tool

WORDING = Wording("'{place}' must be {expected}.")

_TEXT_KEYS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
}
"""Type of a part that is a text, in either API -> the field that has it."""
_MEDIA = {
    "image_url": "image",
    "input_image": "image",
    "file": "file",
    "input_file": "file",
    "input_audio": "audio",
    "video_url": "video",
}
"""Type of a part that is no text -> a word for it. The last is an extension of vLLM and others."""

_ROLES = ("system", "developer", "user", "assistant", "tool")
_RECORDED_OPTIONS = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "n",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "reasoning_effort",
    "verbosity",
    "service_tier",
    "store",
    "modalities",
]
"""Options that the row keeps (`Call.sampling`, key `asked`), part of the `request_digest`. `decode`
also reads those of them that are applied."""
_UNSUPPORTED = ["logprobs", "top_logprobs", "audio"]
_UNSUPPORTED_OF_VLLM = ["echo", "continue_final_message", "prompt_logprobs"]
"""Fields that change the kind of the reply. Other fields that are not read here are hints."""
_CHUNK = "chat.completion.chunk"
_ORPHAN = "Invalid parameter: 'tool_call_id' of '{}' not found in 'tool_calls' of previous message."


class OpenAIDialect(dialect.Dialect):
    """An API of OpenAI's."""

    def encode_error(self, error: DialectError) -> bytes:
        return dump_json(error_body(error, error.code))


def error_body(error: DialectError, code: str | int) -> Object:
    """Return the body of an error reply."""
    kind = "invalid_request_error"
    if error.code == "insufficient_quota":
        kind = error.code  # LiteLLM retries an error of the type invalid_request_error
    elif error.status >= 500:
        kind = "server_error"
    body = {
        "message": str(error),
        "type": kind,
        "param": None,
        "code": code,
    }
    return {"error": body}


def read_content(fields: Fields, key: str, element: Part) -> str:
    """Return the text of a content: absent, a string, or a list of parts (see `read_texts`)."""
    content = fields.values.get(key)
    if isinstance(content, str):
        return content
    return "".join(read_texts(fields, key, element, "a string or a list of parts"))


def read_texts(
    fields: Fields,
    key: str,
    element: Part,
    expected: str = "a list of parts",
) -> list[str]:
    """Return the text of each part of a list. Images, audio and files have a text in their place.

    They are counted in `element.hidden_parts`. Raises `DialectError` for other parts.
    """
    texts = []
    for part in fields.objects(key, expected):
        kind = part.text("type")
        if kind in _MEDIA:
            source = part.inner(kind).values or part.values  # the former in Chat Completions
            declared = source.get("url") or source.get("image_url") or source.get("file_data")
            if kind == "input_audio":
                declared = f"audio/{source.get('format')}"
            texts.append(element.hide(declared, _MEDIA[kind]))
        elif kind in _TEXT_KEYS:
            texts.append(part.text(_TEXT_KEYS[kind]))
        else:
            why = f"has type {described(kind)}; this model takes text only"
            raise DialectError(f"'{part.place()}' {why}.")
    return texts


def refuse_unsupported(
    fields: Fields,
    keys: Iterable[str],
    instead: str = "",
) -> None:
    """Raise `DialectError` for the first of these fields that is neither absent nor empty.

    They change the kind of the reply, so a reply without them would be wrong. `instead` is a
    sentence about the remedy.
    """
    for key in keys:
        if fields.values.get(key):
            parameter = f"Unsupported parameter: '{fields.place(key)}'"
            why = f"{parameter} is not supported with this model. {instead}".strip()
            raise DialectError(why, code="unsupported_parameter")


def require_offered(choice: Fields, offered: Collection[str]) -> None:
    """Raise `DialectError` for a `tool_choice` that names a tool which is not `offered`."""
    if not choice.values:
        return
    choices = [_flat(choice)]
    if choices[0]["type"] == "allowed_tools":
        choices = [_flat(tool) for tool in choices[0].objects("tools")]
    for tool in choices:
        name = tool.maybe("name", str)
        if tool["type"] not in ("function", "custom") or name is None:
            continue
        if name not in offered:
            raise DialectError(f"Tool choice {described(name)} not found in 'tools' parameter.")


def _flat(tool: Fields) -> Fields:
    """Return a tool with its fields beside its type. In Chat Completions they are below it."""
    kind = tool.maybe("type", str) or ""
    return tool.replaced({**tool.values, **tool.inner(kind).values})


def wanted_schema(form: Fields, holder: Fields) -> Object | None:
    """Return the JSON schema of a reply format, which is in the field `schema` of `holder`.

    Returns None when the format is not JSON, `{}` when it has no schema.
    """
    if form["type"] not in ("json_object", "json_schema"):
        return None
    return holder.maybe("schema", dict) or {}


class OpenAIChat(OpenAIDialect):
    """Chat Completions."""

    NAME = "openai-chat"
    CONVERSATION = "messages"
    GENERATE = ("/v1/chat/completions", "/chat/completions")
    MODELS = "/v1/models"

    def decode(
        self,
        request: Object,
        target: str,
        known: Sequence[Part] = (),
    ) -> ModelCall:
        fields = Fields(request, WORDING)
        parts = dialect.decode_parts(fields, self.CONVERSATION, known, _part)
        if not parts:
            raise fields.refusal(self.CONVERSATION, "a non-empty list")
        _refuse_options(fields)
        parts = dialect.name_parts(parts, _ORPHAN)
        limit = "max_completion_tokens"
        if request.get(limit) is None:
            limit = "max_tokens"  # the older name
        form = fields.inner("response_format")
        metadata = fields.inner("metadata")
        model_call = ModelCall(
            model=fields.label("model", ""),
            messages=[*dialect.all_messages(parts)],
            tools=[],
            stream=request.get("stream") is True,
            include_usage=fields.inner("stream_options")["include_usage"] is True,
            max_tokens=fields.optional(limit, Fields.positive_integer),
            stop=fields.stop_texts("stop"),
            may_call=request.get("tool_choice") != "none",
            schema=wanted_schema(form, form.inner("json_schema")),
            requested_sampling=fields.chosen(_RECORDED_OPTIONS),
            client_metadata=metadata.texts_by_place(*metadata.values),
        )
        for tool in fields.objects("tools"):
            _read_tool(tool, model_call)
        if request.get("web_search_options") is not None:
            model_call.hosted_tools.append({"type": "web_search_options"})
        require_offered(fields.inner("tool_choice"), model_call.tool_names)
        return dialect.decoded(model_call, parts)

    def encode_reply(
        self,
        context: ReplyContext,
        reply: Reply,
        usage: Usage,
    ) -> bytes:
        message = reply.to_message()
        if reply.tool_calls:
            message["tool_calls"] = _wire_calls(context, reply)
            message["content"] = message["content"] or None
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": reply.finish_reason,
        }
        whole = _completion(context, "chat.completion", [choice])
        whole["usage"] = _usage(usage)
        return dump_json(whole)

    def stream_encoder(self, context: ReplyContext) -> dialect.StreamEncoder:
        return _StreamEncoder(context)

    def model_entry(self, model: ServedModel, created: int) -> Object:
        return {
            "id": model.name,
            "object": "model",
            "created": created,
            "owned_by": "rolltap",
            "max_model_len": model.context_window,  # vLLM's extension
        }

    def model_list(self, entries: list[Object]) -> Object:
        return {"object": "list", "data": entries}


def _refuse_options(fields: Fields) -> None:
    if fields["n"] not in (None, 1):
        raise fields.refusal("n", "1")
    refuse_unsupported(fields, [*_UNSUPPORTED, *_UNSUPPORTED_OF_VLLM])
    older = ["functions", "function_call"]
    refuse_unsupported(fields, older, "Use 'tools' and 'tool_choice' instead.")
    if fields["modalities"] not in (None, [], ["text"]):
        raise fields.refusal("modalities", "['text']")


def _part(element: Fields) -> Part:
    """Return the part of a message."""
    part = Part()
    role = element.choice("role", _ROLES)
    content = read_content(element, "content", part)
    message: Message = {"role": role, "content": content}
    if role == "developer":
        message["role"] = "system"
    elif role == "assistant":
        refuse_unsupported(element, ["function_call"], "Use 'tool_calls' instead.")
        reasoning = element.maybe("reasoning_content", str) or element.maybe("reasoning", str)
        calls = [_tool_call(call) for call in element.objects("tool_calls")]
        message = assistant_message(content, reasoning or "", calls)
    elif role == "tool":
        message["tool_call_id"] = element.identifier("tool_call_id", "")
        if name := element.maybe("name", str):
            message["name"] = name
    part.messages.append(message)
    return part


def _tool_call(call: Fields) -> Object:
    call_id = call.identifier("id", "")
    function = call.inner("function")
    if call["custom"] and not function.values:
        custom = call.inner("custom")
        text = custom.text("input", "")
        return message_tool_call(call_id, custom.name("name"), {FREEFORM_ARGUMENT: text})
    arguments = function["arguments"]
    if arguments is None:
        arguments = {}
    elif isinstance(arguments, str):
        arguments = parse_arguments(arguments)
    return message_tool_call(call_id, function.name("name"), arguments)


def _wire_calls(context: ReplyContext, reply: Reply) -> list[Object]:
    """Return the calls of a reply: a function call, or a custom call of a custom tool."""
    calls: list[Object] = []
    for call in reply.tool_calls:
        kind = "function"
        called = {"name": call.name, "arguments": call.arguments}
        if call.name in context.model_call.wire_tools:
            kind = "custom"
            called = {"name": call.name, "input": freeform_input(call.arguments)}
        calls.append({"id": call.id, "type": kind, kind: called})
    return calls


def _read_tool(tool: Fields, model_call: ModelCall) -> None:
    kind = tool.text("type", "function")
    declared = tool.inner(kind)
    if kind == "function":
        declared.tool_name("name")
        model_call.tools.append({"type": kind, "function": declared.values})
    elif kind == "custom":
        name = declared.tool_name("name")
        grammar = declared.inner("format").inner("grammar").maybe("definition", str)
        function = freeform_tool(name, declared.maybe("description", str), grammar)
        model_call.tools.append(function)
        model_call.wire_tools[name] = WireTool(name, freeform=True)
    else:
        model_call.hosted_tools.append(tool.values)


class _StreamEncoder(dialect.StreamEncoder):
    def start(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def delta(self, reasoning: str, content: str) -> bytes:
        events = b""
        if reasoning:
            events += self._chunk({"reasoning_content": reasoning})
        if content:
            events += self._chunk({"content": content})
        return events

    def keep_alive(self) -> bytes:
        return self._chunk({})

    def finish(self, reply: Reply, usage: Usage) -> bytes:
        events = b""
        for index, call in enumerate(_wire_calls(self._context, reply)):
            call["index"] = index
            events += self._chunk({"tool_calls": [call]})
        events += self._chunk({}, reply.finish_reason)
        if self._context.model_call.include_usage:
            last = _completion(self._context, _CHUNK, [])
            last["usage"] = _usage(usage)
            events += dialect.server_event(last)
        return events + b"data: [DONE]\n\n"

    def error(self, error: DialectError) -> bytes:
        return dialect.server_event(error_body(error, error.status))

    def _chunk(self, delta: Object, finish_reason: str | None = None) -> bytes:
        choice = {
            "index": 0,
            "delta": delta,
            "finish_reason": finish_reason,
        }
        return dialect.server_event(_completion(self._context, _CHUNK, [choice]))


def _completion(
    context: ReplyContext,
    kind: str,
    choices: list[Object],
) -> Object:
    return {
        "id": f"chatcmpl-{context.call_id}",
        "object": kind,
        "created": context.created,
        "model": context.model_call.model,
        "choices": choices,
    }


def _usage(usage: Usage) -> Object:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }
