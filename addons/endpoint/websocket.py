"""The Responses API over a WebSocket, as Codex speaks it.

A message of type `response.create` asks for a response, in the fields of a request over HTTP. The answer is the events
of a stream, one message each. `generate: false` prepares a response without asking the model: later requests that name
it as `previous_response_id` have its fields and its items in front of their own. No row tells of it, so a connection
keeps the last ones, as JSON, as far as there is room for them.
"""

import json
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any

from aiohttp import WSMsgType, web

from rolltap.addons.dialects import openai_responses
from rolltap.addons.dialects.dialect import Dialect
from rolltap.addons.dialects.fields import Fields, parse_object
from rolltap.addons.dialects.model_call import DialectError, ModelCall, ReplyContext, dump_json
from rolltap.addons.dialects.openai import WORDING
from rolltap.addons.dialects.openai_responses.reply import response
from rolltap.addons.endpoint.body import BODY_LIMIT, Share, too_large
from rolltap.addons.endpoint.exchange import send_events
from rolltap.addons.endpoint.session import AnyCall
from rolltap.addons.offload import Workers

NewShare = Callable[[], AbstractContextManager[Share]]
Begin = Callable[[Dialect, bytes, web.Request], Awaitable[tuple[AnyCall, ModelCall]]]

_MESSAGE_BYTES = 16 * 1024 * 1024
"""Maximum bytes of a message. The proxy has the same limit, `wire.MESSAGE_LIMIT`."""
_REMEMBERED = 8
"""Number of prepared responses of a connection that can be named. Clients prepare one."""
_KEPT_BYTES = BODY_LIMIT // 2
"""Maximum bytes of these responses. With a message and the request that is made of it they fit into the session's
room."""


async def serve_socket(
    request: web.Request,
    begin: Begin,
    reject: Callable[[web.Request, Exception], DialectError],
    workers: Workers,
    share: NewShare,
) -> web.WebSocketResponse:
    """Answer the messages of one connection, one after another, until it is closed.

    `begin` starts or joins the generation of a request. `reject` records the reason why a message was refused.
    Long messages are parsed by `workers`. `share` makes a share of the memory that the session may
    take.
    """
    socket = web.WebSocketResponse(max_msg_size=_MESSAGE_BYTES)
    await socket.prepare(request)
    with share() as kept:
        await _answer_all(socket, request, _Connection(socket, request, begin, workers, share, kept), reject)
    return socket


async def _answer_all(
    socket: web.WebSocketResponse,
    request: web.Request,
    connection: "_Connection",
    reject: Callable[[web.Request, Exception], DialectError],
) -> None:
    async for message in socket:
        if message.type in (WSMsgType.TEXT, WSMsgType.BINARY):
            data = message.data.encode() if isinstance(message.data, str) else message.data
            try:
                await connection.answer(data)
            except ConnectionError:
                break
            except Exception as error:
                await connection.refuse(reject(request, error))


class _Connection:
    def __init__(
        self,
        socket: web.WebSocketResponse,
        request: web.Request,
        begin: Begin,
        workers: Workers,
        share: NewShare,
        kept: Share,
    ) -> None:
        self._socket = socket
        self._request = request
        self._begin = begin
        self._workers, self._share, self._kept = workers, share, kept
        self._prepared: OrderedDict[str, bytes] = OrderedDict()
        """Response id -> the request that prepared it, as JSON."""

    async def answer(self, data: bytes) -> None:
        """Answer one message. Raises `DialectError` and whatever `begin` raises."""
        with self._share() as share:
            await share.take(len(data))
            num_bytes = len(data) + max(map(len, self._prepared.values()), default=0)
            asked, model, generate = await self._workers.run(num_bytes, self._request_of, data)
            await share.take(len(asked))
            begun = await self._begin(openai_responses, asked, self._request) if generate else None
        if begun is None:
            response_id = f"resp_{uuid.uuid4().hex}"
            model_call = ModelCall(model, [], [])
            context = self._reply_context(response_id.removeprefix("resp_"), model_call)
            empty = response(context, status="completed", output=[])
            for event in ("response.created", "response.completed"):
                await self._send(dump_json({"type": event, "response": empty}))
            return self._remember(response_id, asked)
        generation, model_call = begun
        encoder = openai_responses.stream_encoder(self._reply_context(generation.call_id, model_call))
        with generation.listening():
            await send_events(generation, encoder, self._send_events)

    async def refuse(self, error: DialectError) -> None:
        """Send an error message."""
        fields = json.loads(openai_responses.encode_error(error))
        await self._send(dump_json({"type": "error", "status": error.status, **fields}))

    def _request_of(self, data: bytes) -> tuple[bytes, str, bool]:
        """Return the request of a message, its model, and whether to ask the model."""
        message = parse_object(data)
        if message.pop("type", None) != "response.create":
            raise DialectError("A message must have the type 'response.create'.")
        prepared = self._prepared.get(str(message.get("previous_response_id")))
        if prepared is not None:
            before = parse_object(prepared)
            del message["previous_response_id"]
            message = {**before, **message, "input": _items(before.get("input")) + _items(message.get("input"))}
        generate = message.pop("generate", True) is not False
        asked = dump_json({**message, "stream": True})
        if len(asked) > BODY_LIMIT:
            raise too_large(BODY_LIMIT)
        return asked, Fields(message, WORDING).optional("model", Fields.label) or "", generate

    def _remember(self, response_id: str, asked: bytes) -> None:
        """Keep a prepared response, and forget the oldest ones where there is no room for all."""
        while self._prepared and (
            len(self._prepared) >= _REMEMBERED
            or self._kept.held + len(asked) > _KEPT_BYTES
            or not self._kept.fits(len(asked))
        ):
            _, forgotten = self._prepared.popitem(last=False)
            self._kept.free(len(forgotten))
        if len(asked) <= _KEPT_BYTES and self._kept.try_take(len(asked)):
            self._prepared[response_id] = asked

    def _reply_context(self, call_id: str, model_call: ModelCall) -> ReplyContext:
        return ReplyContext(call_id, int(time.time()), self._request.raw_path, model_call)

    async def _send_events(self, events: bytes) -> None:
        """Send each of the server-sent events as a message."""
        for event in events.split(b"\n\n"):
            _, _, data = event.partition(b"\ndata: ")
            if data:
                await self._send(data)

    async def _send(self, data: bytes) -> None:
        await self._socket.send_str(data.decode())


def _items(given: Any) -> list[Any]:
    """Return an `input` as a list of items. A text becomes a user message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return given if isinstance(given, list) else []
