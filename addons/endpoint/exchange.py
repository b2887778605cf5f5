"""One request and its reply: headers at once, text as it is sampled, this API's keep-alives, and the end once the call
is on disk."""

import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from rolltap.addons.dialects.dialect import Dialect, StreamEncoder
from rolltap.addons.dialects.types import DialectError, ReplyContext
from rolltap.addons.endpoint.generation import Generation

Write = Callable[[bytes], Awaitable[None]]

KEEP_ALIVE_SECONDS = 15.0
"""Harnesses give up after 60 s of silence at the earliest (Gemini CLI)."""
COALESCE_SECONDS = 0.1
"""Deltas leave at most this often: every chunk costs the proxy 30 to 90 microseconds."""
LONGEST_PAUSE_SECONDS = 2.0
"""Deltas leave at least this often while there are some."""


async def respond(
    generation: Generation, dialect: Dialect, context: ReplyContext, request: web.Request
) -> web.StreamResponse:
    """Answer with one body. When it takes long, its white space begins before its contents."""
    response: web.StreamResponse | None = None
    with generation.listening():
        while not await generation.finished(KEEP_ALIVE_SECONDS):
            if response is None:
                response = web.StreamResponse(headers=_headers(generation, "application/json"))
                await response.prepare(request)
            await response.write(b" ")
        if generation.reply is None:
            assert generation.error is not None
            status, body = generation.error.status, dialect.encode_error(generation.error)
        else:
            status, body = 200, dialect.encode_reply(context, generation.reply, generation.usage)
        if response is None:
            response = web.Response(body=body, status=status, headers=_headers(generation, "application/json"))
            await response.prepare(request)
        else:
            await response.write(body)
        await response.write_eof()
    return response


async def stream(
    generation: Generation, dialect: Dialect, context: ReplyContext, request: web.Request
) -> web.StreamResponse:
    """Answer with events."""
    encoder = dialect.stream_encoder(context)
    response = web.StreamResponse(headers=_headers(generation, encoder.content_type))
    with generation.listening():
        await response.prepare(request)
        await send_events(generation, encoder, response.write)
        await response.write_eof()
    return response


async def send_events(generation: Generation, encoder: StreamEncoder, write: Write) -> None:
    """Write the events of a reply as it grows, from its beginning, also when it began before this request."""
    await write(encoder.start())
    sent = 0
    while True:
        started = time.thread_time()
        parsed = generation.advance()
        # a long reply takes longer to parse each time: spend at most a twentieth of the time on it
        pause = min(max(COALESCE_SECONDS, 20 * (time.thread_time() - started)), LONGEST_PAUSE_SECONDS)
        pieces = generation.pieces[sent:]
        sent += len(pieces)
        await write(b"".join(encoder.delta(reasoning, content) for reasoning, content in pieces))
        if generation.reply is not None:
            return await write(encoder.finish(generation.reply, generation.usage))
        if generation.error is not None:
            return await write(encoder.error(generation.error))
        if parsed:
            await generation.finished(pause)
        if not await generation.changed(KEEP_ALIVE_SECONDS):
            await write(encoder.keep_alive())


def _headers(generation: Generation, content_type: str) -> dict[str, str]:
    """The call's id is the request's id, under the names that OpenAI's and Anthropic's SDKs look for."""
    call_id = generation.call.call_id
    return {
        "content-type": content_type,
        "cache-control": "no-cache",
        "x-request-id": call_id,
        "request-id": call_id,
    }


def error_response(dialect: Dialect, error: DialectError) -> web.Response:
    """The error as this API writes it."""
    return web.Response(body=dialect.encode_error(error), status=error.status, content_type="application/json")
