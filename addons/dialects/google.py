"""The Gemini API, which the Google Gen AI SDKs, Gemini CLI and clients of Vertex AI use.

It serves generateContent, streamGenerateContent, countTokens and the list of models. Field names
follow the Gemini API reference. Its peculiarities:

| on the wire | here |
| --- | --- |
| names in camelCase or snake_case, one message in place of a list | `protobuf` reads both |
| consecutive contents of the model are one turn | one message |
| calls and responses without ids | `_link` gives them the ids of the calls |
| LiteLLM drops the ids of calls and keeps the signature | the ids follow from the signature |
| a `functionResponse` is an object | its lone text, or JSON with sorted keys |
| parsers of protobuf accept 100 levels | arguments of more than 80 levels are sent as text |
| a stream is a JSON array, or events with `alt=sse` | two encoders |
| the SDK splits lines at U+0085, U+2028 and U+2029 | events are ASCII |
"""

import json
import re
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from urllib.parse import parse_qs, unquote

from rolltap.addons.dialects import dialect
from rolltap.addons.dialects.call import (
    ContextOverflow,
    DialectError,
    Message,
    ModelCall,
    Part,
    Reply,
    ReplyContext,
    ServedModel,
    Usage,
    assistant_message,
    message_tool_call,
    sign,
    signed_call,
    tool_call_id,
)
from rolltap.addons.dialects.fields import Fields
from rolltap.addons.dialects.json_values import Object, dump_json, is_word
from rolltap.addons.dialects.protobuf import (
    WORDING,
    camel_case_fields,
    message_field,
    repeated_field,
    schema_field,
)
from rolltap.addons.dialects.tools import as_object, from_object, function_tool

_MODELS = re.compile(r"/v1beta/models(/[^:]+)?")  # /v1/models is routed to OpenAI, which has it too
_METHOD = re.compile(
    r"/(?:v1|v1beta|v1beta1)/(?:(?:projects/[^/]+/locations/[^/]+/)?publishers/google/)?"
    r"models/(?P<model>.+):(?P<method>generateContent|streamGenerateContent|countTokens)"
)
_RECORDED_OPTIONS = (
    "temperature",
    "topP",
    "topK",
    "seed",
    "presencePenalty",
    "frequencyPenalty",
    "responseMimeType",
    "responseModalities",
    "thinkingConfig",
    "mediaResolution",
    "routingConfig",
    "modelSelectionConfig",
)
"""Options that the row keeps (`Call.sampling`, key `asked`), part of the `request_digest`. `decode`
also reads those of them that are applied."""
_ENUM = "text/x.enum"
"""The type of a reply that is one of the texts of an enumeration."""
_ROLES = ("user", "model", "function")
_MEDIA = ("inlineData", "fileData")
_OTHER_FIELDS = (
    "thought",
    "thoughtSignature",
    "partMetadata",
    "mediaResolution",
    "videoMetadata",
)
"""Fields that a part may have beside its data."""
_MOST_LEVELS = 80
"""Levels of arguments in a reply, which are about 10 levels below the top of its body."""
_STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


class GoogleGenerateContent(dialect.Dialect):
    """The Gemini API."""

    NAME = "google-generate-content"
    CONVERSATION = "contents"

    def operation(self, method: str, path: str) -> dialect.Operation | None:
        if method == "GET" and _MODELS.fullmatch(path):
            return "models"
        match = _METHOD.fullmatch(path)
        if method != "POST" or match is None:
            return None
        if match["method"] == "countTokens":
            return "count_tokens"
        return "generate"

    def decode(
        self,
        request: Object,
        target: str,
        known: Sequence[Part] = (),
    ) -> ModelCall:
        match = _METHOD.fullmatch(target.partition("?")[0])
        assert match is not None
        model = Fields({"model": unquote(match["model"])}, WORDING).label("model")
        fields = Fields(camel_case_fields(request), WORDING)
        if fields["contents"] is None:  # countTokens may have a whole request in place of them
            fields = message_field(fields, "generateContentRequest")
        config = message_field(fields, "generationConfig")
        _refuse_unsupported(fields, config, model)
        system = _system_part(fields)
        parts = list(known)
        for content in repeated_field(fields, "contents", len(known)):
            parts.append(_part(content))
        if not parts:
            raise DialectError("* GenerateContentRequest.contents: contents is not specified")
        _link(parts)
        calling = message_field(message_field(fields, "toolConfig"), "functionCallingConfig")
        thinking = message_field(config, "thinkingConfig")
        call = ModelCall(
            model=model,
            messages=system.messages + dialect.join_turns(parts, ""),
            tools=[],
            stream=match["method"] == "streamGenerateContent",
            max_tokens=config.optional("maxOutputTokens", Fields.positive_integer),
            stop=config.stop_texts("stopSequences"),
            reply_is_enum=config["responseMimeType"] == _ENUM,
            schema=_reply_schema(config),
            may_call=calling["mode"] != "NONE",
            reasoning="shown" if thinking["includeThoughts"] is True else "signed",
            requested_sampling=config.chosen(_RECORDED_OPTIONS),
            hidden_parts=system.hidden_parts,
        )
        call.requested_sampling |= fields.chosen(("toolConfig", "safetySettings"))
        for tool in repeated_field(fields, "tools"):
            _read_tool(tool, call)
        offered = call.tool_names
        for index, name in enumerate(calling.texts("allowedFunctionNames")):
            if name not in offered:
                expected = "the name of a declared function"
                raise calling.refusal("allowedFunctionNames", expected, index)
        return dialect.decoded(call, parts)

    def encode_reply(
        self,
        context: ReplyContext,
        reply: Reply,
        usage: Usage,
    ) -> bytes:
        parts = _text_parts(context, reply.reasoning, reply.content)
        # a text without calls carries the signature itself
        if reply.content and not reply.tool_calls:
            parts[-1]["thoughtSignature"] = sign(context.call_id)
        else:
            parts += _last_parts(context, reply)
        return dump_json(_response(context, parts, reply, usage))

    def stream_encoder(self, context: ReplyContext) -> dialect.StreamEncoder:
        query = parse_qs(context.target.partition("?")[2])
        if query.get("alt", query.get("$alt")) == ["sse"]:
            return _EventStreamEncoder(context)
        return _ArrayStreamEncoder(context)

    def encode_error(self, error: DialectError) -> bytes:
        return dump_json(_error(error))

    def encode_token_count(self, num_tokens: int) -> bytes:
        return dump_json({"totalTokens": num_tokens})

    def model_entry(self, model: ServedModel, created: int) -> Object:
        return {
            "name": f"models/{model.name}",
            "version": "001",
            "displayName": model.name,
            "inputTokenLimit": model.context_window,
            "outputTokenLimit": model.context_window,
            "supportedGenerationMethods": ["generateContent", "countTokens"],
        }

    def model_list(self, entries: list[Object]) -> Object:
        return {"models": entries}


def _refuse_unsupported(fields: Fields, config: Fields, model: str) -> None:
    if fields["cachedContent"]:
        instead = "send its contents, instructions and tools in the request"
        raise DialectError(f"'cached_content' is not served here: {instead}.")
    if config["candidateCount"] not in (None, 1):
        raise config.refusal("candidateCount", "1")
    if config["responseLogprobs"] or config["logprobs"]:
        raise DialectError(f"Logprobs is not enabled for models/{model}")
    if config["responseModalities"] not in (None, [], ["TEXT"]):
        raise config.refusal("responseModalities", "['TEXT']")
    if config["responseMimeType"] not in (None, "", "text/plain", "application/json", _ENUM):
        expected = f"'text/plain', 'application/json' or '{_ENUM}'"
        raise config.refusal("responseMimeType", expected)


def _reply_schema(config: Fields) -> Object | None:
    kind = config["responseMimeType"]
    if kind not in ("application/json", _ENUM):
        return None
    schema = schema_field(config, "responseJsonSchema", "responseSchema") or {}
    if kind != _ENUM:
        return schema
    texts = config.at("responseSchema", schema).texts("enum")
    if not texts:
        raise config.refusal("responseSchema", "a schema with an enum")
    return {"type": "string", "enum": texts}


def _read_tool(tool: Fields, call: ModelCall) -> None:
    for function in repeated_field(tool, "functionDeclarations"):
        name = function.tool_name("name")
        parameters = schema_field(function, "parametersJsonSchema", "parameters")
        description = function.maybe("description", str)
        call.tools.append(function_tool(name, description, parameters))
    for kind in tool.values:
        if kind != "functionDeclarations":
            call.hosted_tools.append({"type": kind})


def _system_part(fields: Fields) -> Part:
    """Decode the `systemInstruction`. One without text is no message.

    Each of its parts is a separate text ("You are a cat.", "Your name is Neko.").
    """
    part = Part()
    text = fields.maybe("systemInstruction", str)
    if text is None:
        instruction = message_field(fields, "systemInstruction")
        texts = [_text(piece, part) for piece in repeated_field(instruction, "parts")]
        text = "\n\n".join(filter(None, texts))
    if text:
        part.messages.append({"role": "system", "content": text})
    return part


def _part(content: Fields) -> Part:
    """Decode a content: tool messages and a text of the user, or a message of the model.

    The ids of calls and responses are those of the wire, which may be empty: see `_link`.
    """
    is_model = bool(content["role"]) and content.choice("role", _ROLES) == "model"
    part = Part()
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Object] = []
    call_id: str | None = None
    for piece in repeated_field(content, "parts"):
        call_id = call_id or signed_call(piece["thoughtSignature"])
        if is_model and piece["functionCall"] is not None:
            calls.append(_tool_call(message_field(piece, "functionCall")))
        elif not is_model and piece["functionResponse"] is not None:
            part.messages.append(_result(message_field(piece, "functionResponse"), part))
        elif is_model and piece["thought"] is True:
            thoughts.append(_text(piece, part))
        else:
            texts.append(_text(piece, part))
    text = "".join(texts)
    if is_model:
        message = assistant_message(text, "".join(thoughts), calls, call_id)
        part.messages.append(message)
    elif text or not part.messages:
        part.messages.append({"role": "user", "content": text})
    return part


def _tool_call(call: Fields) -> Object:
    arguments = call.object("args", {})
    call_id = call.identifier("id", "")
    return message_tool_call(call_id, call.name("name"), from_object(arguments))


def _result(response: Fields, part: Part) -> Message:
    """Return a function's response as a tool message.

    An object becomes its only field when that is the string `output`, as in the API reference, or
    `result`, as in Google's SDKs. Another object, such as an `error`, becomes JSON with sorted
    keys: the fields of a protobuf struct have no order, and clients may send them in another order
    each time.
    """
    fields = response.object("response", {})
    text = fields.get("output", fields.get("result"))
    if len(fields) != 1 or not isinstance(text, str):
        text = json.dumps(fields, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    for piece in repeated_field(response, "parts"):
        text += "\n" + _text(piece, part)
    return {
        "role": "tool",
        "content": text,
        "tool_call_id": response.identifier("id", ""),
        "name": response.name("name"),
    }


def _text(piece: Fields, part: Part) -> str:
    """Return the text of a piece of a content, or the text in the place of its media.

    A piece without data, for instance with a signature only, is an empty text.
    """
    for kind in _MEDIA:
        media = piece.maybe(kind, dict)
        if media is not None:
            return part.hide(camel_case_fields(media).get("mimeType"), "file")
    if piece["text"] is not None:
        return piece.text("text")
    for field in piece.values:
        if field not in _OTHER_FIELDS:
            # an error is recorded, and this name is the harness's
            place = piece.place(field if is_word(field) else None)
            raise DialectError(f"'{place}' is not supported here: this model takes text only.")
    return ""


def _link(parts: Iterable[Part]) -> None:
    """Give calls and responses their ids. Those of parts that are known stay as they are.

    A call without an id gets that with which it was issued, if its turn was signed up to there,
    and else a numbered one. A response answers an open call of the last model turn: the call with
    its id, else the first call with its name.
    """
    number = 0
    in_turn = False
    first = 0
    call_id: str | None = None
    open_calls: defaultdict[str, OrderedDict[str, None]] = defaultdict(OrderedDict)
    for part in parts:
        for message in part.messages:
            if message["role"] == "assistant" and not in_turn:
                open_calls.clear()
                first = number
                call_id = None
            in_turn = message["role"] == "assistant"
            call_id = call_id or message.get("call_id")
            for call in message.get("tool_calls", ()):
                if call_id and not call["id"]:
                    call["id"] = tool_call_id(call_id, number - first)
                number += 1
                call["id"] = call["id"] or f"call_{number}"
                open_calls[call["function"]["name"]][call["id"]] = None
            if message["role"] == "tool":
                ids = open_calls[message["name"]]
                if message["tool_call_id"] in ids:
                    del ids[message["tool_call_id"]]
                elif ids:
                    message["tool_call_id"], _ = ids.popitem(last=False)


def _response(
    context: ReplyContext,
    parts: list[Object],
    reply: Reply | None = None,
    usage: Usage | None = None,
) -> Object:
    """Return a `GenerateContentResponse`: a whole reply, or a chunk of a stream.

    A whole reply and the last chunk have `reply` and `usage`.
    """
    candidate: Object = {
        "content": {"role": "model", "parts": parts},
        "index": 0,
    }
    response: Object = {
        "candidates": [candidate],
        "modelVersion": context.model_call.model,
        "responseId": context.call_id,
    }
    if reply is not None:
        candidate["finishReason"] = "STOP"
        if reply.finish_reason == "length":
            candidate["finishReason"] = "MAX_TOKENS"
    if usage is not None:
        response["usageMetadata"] = {
            "promptTokenCount": usage.prompt,
            "candidatesTokenCount": usage.completion - usage.reasoning,
            "thoughtsTokenCount": usage.reasoning,
            "totalTokenCount": usage.prompt + usage.completion,
            "cachedContentTokenCount": usage.cached,
        }
    return response


def _text_parts(
    context: ReplyContext,
    reasoning: str,
    content: str,
) -> list[Object]:
    """Return a part for reasoning, if the request asks for it, and one for content if any."""
    parts: list[Object] = []
    if reasoning and context.model_call.reasoning == "shown":
        parts.append({"text": reasoning, "thought": True})
    if content:
        parts.append({"text": content})
    return parts


def _last_parts(context: ReplyContext, reply: Reply) -> list[Object]:
    """Return the calls, or else an empty text. The first of these parts has the signature."""
    parts: list[Object] = []
    for call in reply.tool_calls:
        arguments = as_object(call.arguments, _MOST_LEVELS)
        function_call = {"id": call.id, "name": call.name, "args": arguments}
        parts.append({"functionCall": function_call})
    if not parts:
        parts.append({"text": ""})
    parts[0]["thoughtSignature"] = sign(context.call_id)
    return parts


def _error(error: DialectError) -> Object:
    message = str(error)
    if isinstance(error, ContextOverflow):
        message = (
            f"The input token count ({error.prompt_tokens}) "
            f"exceeds the maximum number of tokens allowed ({error.limit})."
        )
    others = "INVALID_ARGUMENT" if error.status < 500 else "INTERNAL"
    status = _STATUS.get(error.status, others)
    body = {
        "code": error.status,
        "message": message,
        "status": status,
    }
    return {"error": body}


class _EventStreamEncoder(dialect.StreamEncoder):
    """Encoder of one streamed reply as server-sent events, each of which contains one chunk."""

    def start(self) -> bytes:
        """Return no bytes, because clients parse each event as a chunk of the reply."""
        return b""

    def delta(self, reasoning: str, content: str) -> bytes:
        """Return a chunk of new text. Reasoning that is not sent becomes a keep-alive."""
        parts = _text_parts(self._context, reasoning, content)
        if not parts:
            return self.keep_alive()
        return self._chunk(_response(self._context, parts))

    def keep_alive(self) -> bytes:
        """Return a blank line, because Gemini CLI's parser does not accept SSE comments."""
        return b"\n"

    def finish(self, reply: Reply, usage: Usage) -> bytes:
        parts = _last_parts(self._context, reply)
        return self._chunk(_response(self._context, parts, reply, usage))

    def error(self, error: DialectError) -> bytes:
        return self._chunk(_error(error))

    def _chunk(self, value: Object) -> bytes:
        text = json.dumps(value, separators=(",", ":"))
        return f"data: {text}\r\n\r\n".encode()


class _ArrayStreamEncoder(_EventStreamEncoder):
    """Encoder of one streamed reply as a JSON array of chunks."""

    content_type = "application/json"
    _separator = b""

    def start(self) -> bytes:
        return b"["

    def finish(self, reply: Reply, usage: Usage) -> bytes:
        return super().finish(reply, usage) + b"]"

    def error(self, error: DialectError) -> bytes:
        return super().error(error) + b"]"

    def _chunk(self, value: Object) -> bytes:
        chunk = self._separator + dump_json(value)
        self._separator = b",\r\n"
        return chunk
