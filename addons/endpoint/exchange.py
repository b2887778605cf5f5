"""One HTTP exchange: a request and its reply, streamed or plain."""

from collections.abc import Awaitable, Callable

from aiohttp import web

from rolltap.addons.dialects.call import DialectError, ReplyContext
from rolltap.addons.dialects.dialect import Dialect, StreamEncoder
from rolltap.addons.endpoint.generation import Generation

Write = Callable[[bytes], Awaitable[None]]

KEEP_ALIVE_SECONDS = 15.0
"""Seconds of silence after which a keep-alive is sent. The shortest idle timeout known is 60 s
(Gemini CLI)."""
COALESCE_SECONDS = 0.1
"""Minimum seconds between two chunks of deltas. A chunk costs the proxy 30 to 90 microseconds."""


async def respond(
    generation: Generation,
    dialect: Dialect,
    context: ReplyContext,
    request: web.Request,
) -> web.StreamResponse:
    """Answer with one JSON body.

    After `KEEP_ALIVE_SECONDS` the headers are sent with status 200, followed by spaces as
    keep-alives. A later error then breaks the connection: SDKs retry after that, and would take
    an error with status 200 for an answer.
    """
    headers = _headers(generation, "application/json")
    response: web.StreamResponse | None = None
    with generation.listening():
        while not await generation.finished(KEEP_ALIVE_SECONDS):
            if response is None:
                response = web.StreamResponse(headers=headers)
                await response.prepare(request)
            await response.write(b" ")
        if generation.reply is None:
            assert generation.error is not None
            if response is None:
                response = error_response(dialect, generation.error)
                response.headers.update(headers)
            elif request.transport is not None:
                request.transport.abort()
            return response
        body = dialect.encode_reply(context, generation.reply, generation.usage)
        if response is None:
            response = web.Response(body=body, headers=headers)
            await response.prepare(request)
        else:
            await response.write(body)
        await response.write_eof()
    return response


async def stream(
    generation: Generation,
    dialect: Dialect,
    context: ReplyContext,
    request: web.Request,
) -> web.StreamResponse:
    """Answer with a stream of events. Errors are events too: the status is 200."""
    encoder = dialect.stream_encoder(context)
    response = web.StreamResponse(headers=_headers(generation, encoder.content_type))
    with generation.listening():
        await response.prepare(request)
        await send_events(generation, encoder, response.write)
        await response.write_eof()
    return response


async def send_events(generation: Generation, encoder: StreamEncoder, write: Write) -> None:
    """Write the events of a growing reply. A request that joins late gets all events from the
    first one on."""
    await write(encoder.start())
    num_sent = 0
    while True:
        pieces = generation.pieces[num_sent:]
        num_sent += len(pieces)
        if pieces:
            reasoning = "".join(piece[0] for piece in pieces)
            content = "".join(piece[1] for piece in pieces)
            await write(encoder.delta(reasoning, content))
        if generation.reply is not None:
            return await write(encoder.finish(generation.reply, generation.usage))
        if generation.error is not None:
            return await write(encoder.error(generation.error))
        if pieces:
            await generation.finished(COALESCE_SECONDS)
        # text of a tool call is no piece: without a keep-alive the client would hear nothing of a
        # long one
        if not await generation.changed(num_sent, KEEP_ALIVE_SECONDS):
            await write(encoder.keep_alive())


def _headers(generation: Generation, content_type: str) -> dict[str, str]:
    """Return the reply's headers. The call id is the request id, under the names of OpenAI's and
    Anthropic's SDKs."""
    return {
        "content-type": content_type,
        "cache-control": "no-cache",
        "x-request-id": generation.call_id,
        "request-id": generation.call_id,
    }


def error_response(dialect: Dialect, error: DialectError) -> web.Response:
    """Return the HTTP response for an error, in the format of its API."""
    headers = {"content-type": "application/json"}
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    return web.Response(body=dialect.encode_error(error), status=error.status, headers=headers)
