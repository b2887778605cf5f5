"""The Responses API over a WebSocket, as Codex speaks it.

A message of type `response.create` asks for a response. The answer is the events of a stream, one message each. A
request may name an earlier response (`previous_response_id`) and send only the new items. A connection therefore keeps
the conversations of its last responses. `generate: false` creates a response without asking the model.
"""

import json
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import WSMsgType, web

from rolltap.addons.dialects import openai_responses
from rolltap.addons.dialects.dialect import Dialect
from rolltap.addons.dialects.fields import parse_object
from rolltap.addons.dialects.openai_responses.reply import response
from rolltap.addons.dialects.types import DialectError, ModelCall, ReplyContext, dump_json
from rolltap.addons.endpoint.exchange import send_events
from rolltap.addons.endpoint.failures import as_dialect_error
from rolltap.addons.endpoint.session_state import AnyCall

Begin = Callable[[Dialect, bytes, web.Request], Awaitable[tuple[AnyCall, ModelCall]]]

_REMEMBERED = 8
"""Number of responses of a connection that can be named as `previous_response_id`. Clients name the last or, for a
retry, the one before."""
_ENDS = (b"event: response.completed", b"event: response.incomplete")


async def serve_socket(
    request: web.Request, begin: Begin, reject: Callable[[web.Request, str], None]
) -> web.WebSocketResponse:
    """Answer the messages of one connection, one after another, until it is closed.

    `begin` starts or joins the generation of a request. `reject` records the reason why a message was refused.
    """
    socket = web.WebSocketResponse(max_msg_size=request.client_max_size)
    await socket.prepare(request)
    connection = _Connection(socket, request, begin)
    async for message in socket:
        if message.type in (WSMsgType.TEXT, WSMsgType.BINARY):
            data = message.data.encode() if isinstance(message.data, str) else message.data
            try:
                await connection.answer(data)
            except ConnectionError:
                break
            except Exception as error:
                reject(request, str(error) or repr(error))
                await connection.refuse(as_dialect_error(error))
    return socket


class _Connection:
    def __init__(self, socket: web.WebSocketResponse, request: web.Request, begin: Begin) -> None:
        self._socket = socket
        self._request = request
        self._begin = begin
        self._bodies: OrderedDict[str, dict[str, Any]] = OrderedDict()
        """Response id -> the request body whose `input` is the conversation up to and with that response."""
        self._ended: dict[str, Any] = {}

    async def answer(self, data: bytes) -> None:
        """Answer one message. Raises `DialectError` and whatever `begin` raises."""
        body = self._whole_request(parse_object(data))
        if body.pop("generate", True) is False:
            response_id = f"resp_{uuid.uuid4().hex}"
            model_call = ModelCall(str(body.get("model") or ""), [], [])
            context = self._reply_context(response_id.removeprefix("resp_"), model_call)
            empty = response(context, status="completed", output=[])
            for event in ("response.created", "response.completed"):
                await self._send(dump_json({"type": event, "response": empty}))
            return self._remember(response_id, body, [])
        asked = dump_json({**body, "stream": True})
        generation, model_call = await self._begin(openai_responses, asked, self._request)
        encoder = openai_responses.stream_encoder(self._reply_context(generation.call_id, model_call))
        with generation.listening():
            await send_events(generation, encoder, self._send_events)
        if generation.reply is not None:
            self._remember(self._ended["id"], body, self._ended["output"])

    async def refuse(self, error: DialectError) -> None:
        """Send an error message."""
        fields = json.loads(openai_responses.encode_error(error))
        await self._send(dump_json({"type": "error", "status": error.status, **fields}))

    def _whole_request(self, message: dict[str, Any]) -> dict[str, Any]:
        if message.pop("type", None) != "response.create":
            raise DialectError("A message must have the type 'response.create'.")
        previous = message.pop("previous_response_id", None)
        if previous is None:
            return message
        before = self._bodies.get(str(previous))
        if before is None:
            raise DialectError(f"Previous response with id '{previous}' not found.", code="previous_response_not_found")
        return {**before, **message, "input": before["input"] + _items(message.get("input"))}

    def _remember(self, response_id: str, body: dict[str, Any], output: list[Any]) -> None:
        self._bodies[response_id] = {**body, "input": _items(body.get("input")) + output}
        while len(self._bodies) > _REMEMBERED:
            self._bodies.popitem(last=False)

    def _reply_context(self, call_id: str, model_call: ModelCall) -> ReplyContext:
        return ReplyContext(call_id, int(time.time()), self._request.raw_path, model_call)

    async def _send_events(self, events: bytes) -> None:
        """Send each of the server-sent events as a message. Keeps the response of the final one in `_ended`."""
        for event in events.split(b"\n\n"):
            name, _, data = event.partition(b"\ndata: ")
            if name in _ENDS:
                self._ended = json.loads(data)["response"]
            if data:
                await self._send(data)

    async def _send(self, data: bytes) -> None:
        await self._socket.send_str(data.decode())


def _items(given: Any) -> list[Any]:
    """Return an `input` as a list of items. A text becomes a user message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return given if isinstance(given, list) else []
