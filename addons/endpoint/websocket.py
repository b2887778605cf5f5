"""The Responses API over a WebSocket, as Codex speaks it.

A message of type `response.create` asks for a response, in the fields of a request over HTTP. The answer is the events
of a stream, one message each. `generate: false` prepares a response without asking the model: later requests that name
it as `previous_response_id` have its fields and its items in front of their own. No row records it, so a connection
keeps the last ones, as JSON, within its session's memory quota.

A request with `store: false` can name the responses of its own connection, until a request that names one fails.
"""

import json
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import WSMsgType, web

from rolltap.addons.concurrency import Workers
from rolltap.addons.dialects import openai_responses
from rolltap.addons.dialects.fields import Fields, parse_object
from rolltap.addons.dialects.model_call import DialectError, ModelCall, ReplyContext, dump_json
from rolltap.addons.dialects.openai import WORDING
from rolltap.addons.dialects.openai_responses.reply import response
from rolltap.addons.dialects.stored import shown_id
from rolltap.addons.endpoint.body import BODY_LIMIT, MemoryQuota, Reservation, too_large
from rolltap.addons.endpoint.exchange import send_events
from rolltap.addons.endpoint.request import ClientRequest
from rolltap.addons.endpoint.retries import AnyCall

_MESSAGE_BYTES = 16 * 1024 * 1024
"""Maximum bytes of a message. The proxy has the same limit, `wire.MESSAGE_LIMIT`."""
_REMEMBERED = 8
"""Number of prepared responses of a connection that can be named. Clients prepare one."""
_KEPT_BYTES = BODY_LIMIT // 2
"""Maximum bytes of these responses. With a message and the request that is made of it they fit into the session's
quota."""


@dataclass(kw_only=True, eq=False)
class SocketConnection:
    """One connection, whose messages are answered one after another."""

    client: ClientRequest
    begin: Callable[[bytes], Awaitable[tuple[AnyCall, ModelCall]]]
    """Starts or joins the generation of a request."""
    reject: Callable[[Exception], DialectError]
    """Records why a message was refused. Returns the error as the client receives it."""
    workers: Workers
    """Parse long messages."""
    quota: MemoryQuota
    _socket: web.WebSocketResponse = field(init=False)
    _named: str = field(default="", init=False)
    """The response that the last request named."""
    _known: set[str] = field(default_factory=set, init=False)
    """Ids of its responses, without those that a failed request named."""
    _prepared: OrderedDict[str, bytes] = field(default_factory=OrderedDict, init=False)
    """Response id -> the request that prepared it, as JSON."""

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        """Answer messages until the connection is closed."""
        self._socket = web.WebSocketResponse(max_msg_size=_MESSAGE_BYTES)
        await self._socket.prepare(request)
        with self.quota.reserve(self.client.session_id) as kept:
            async for message in self._socket:
                if message.type in (WSMsgType.TEXT, WSMsgType.BINARY):
                    data = message.data.encode() if isinstance(message.data, str) else message.data
                    try:
                        await self._answer(data, kept)
                    except ConnectionError:
                        break
                    except Exception as error:
                        self._known.discard(self._named)
                        refusal = self.reject(error)
                        fields = json.loads(openai_responses.encode_error(refusal))
                        await self._send(dump_json({"type": "error", "status": refusal.status, **fields}))
        return self._socket

    async def _answer(self, data: bytes, kept: Reservation) -> None:
        """Answer one message. Raises `DialectError` and whatever `begin` raises."""
        self._named = ""
        with self.quota.reserve(self.client.session_id) as held:
            await held.take(len(data))
            num_bytes = len(data) + max(map(len, self._prepared.values()), default=0)
            body, model, generate = await self.workers.run(num_bytes, self._request_of, data)
            await held.take(len(body))
            begun = await self.begin(body) if generate else None
        if begun is None:
            response_id = f"resp_{uuid.uuid4().hex}"
            context = self._reply_context(response_id.removeprefix("resp_"), ModelCall(model, [], []))
            empty = response(context, status="completed", output=[])
            for number, event in enumerate(("response.created", "response.completed")):
                await self._send(dump_json({"type": event, "sequence_number": number, "response": empty}))
            return self._remember(response_id, body, kept)
        generation, model_call = begun
        encoder = openai_responses.stream_encoder(self._reply_context(generation.call_id, model_call))
        with generation.listening():
            await send_events(generation, encoder, self._send_events)
        if generation.reply is None:
            self._known.discard(self._named)
        else:
            self._known.add(f"resp_{generation.call_id}")

    def _request_of(self, data: bytes) -> tuple[bytes, str, bool]:
        """Return the request of a message, its model, and whether to ask the model."""
        message = parse_object(data)
        if message.pop("type", None) != "response.create":
            raise DialectError("A message must have the type 'response.create'.")
        named = message.get("previous_response_id")
        self._named = str(named)
        prepared = self._prepared.get(self._named)
        unknown = named is not None and prepared is None and self._named not in self._known
        if unknown and message.get("store") is False:
            why = f"Previous response with id {shown_id(self._named)} not found."
            raise DialectError(why, code="previous_response_not_found")
        if prepared is not None:
            before = parse_object(prepared)
            del message["previous_response_id"]
            message = {**before, **message, "input": _items(before.get("input")) + _items(message.get("input"))}
        generate = message.pop("generate", True) is not False
        body = dump_json({**message, "stream": True})
        if len(body) > BODY_LIMIT:
            raise too_large(BODY_LIMIT)
        return body, Fields(message, WORDING).optional("model", Fields.label) or "", generate

    def _remember(self, response_id: str, body: bytes, kept: Reservation) -> None:
        """Keep a prepared response. Forget the oldest ones where the quota has not enough for all."""
        while self._prepared and (
            len(self._prepared) >= _REMEMBERED or kept.num_bytes + len(body) > _KEPT_BYTES or not kept.fits(len(body))
        ):
            _, forgotten = self._prepared.popitem(last=False)
            kept.free(len(forgotten))
        if len(body) <= _KEPT_BYTES and kept.try_take(len(body)):
            self._prepared[response_id] = body

    def _reply_context(self, call_id: str, model_call: ModelCall) -> ReplyContext:
        return ReplyContext(call_id, int(time.time()), self.client.target, model_call)

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
