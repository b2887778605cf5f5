"""A client of the endpoint that sends the headers which `Capture` adds to a harness's requests."""

import asyncio
import json
from contextlib import asynccontextmanager

import aiohttp

from rolltap.addons.endpoint.server import Endpoint
from rolltap.addons.options import RecorderOptions
from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.tables import RunWriter, read_rows

PATH = "/v1/chat/completions"
RETRY = {"x-stainless-retry-count": "1"}
"""The header of a request that its client has sent before."""


def user(text="Hello"):
    return {"role": "user", "content": text}


def content(events):
    """Return the text of a Chat Completions stream. An incomplete last event is ignored."""
    text = ""
    for event in events.split("\n\n")[:-1]:
        data = event.removeprefix("data: ")
        if data != "[DONE]":
            for choice in json.loads(data).get("choices", ()):
                text += choice["delta"].get("content", "")
    return text


def said(reply):
    """Return the text of a reply of the Chat Completions API."""
    return reply["choices"][0]["message"]["content"]


def spans(call):
    """Return the version, the start and the end of each span of weights."""
    return [(span["version"], span["start"], span["end"]) for span in call["weight_versions"]]


def rows(table):
    """Return the words of each line of a table."""
    return [line.split() for line in table.strip().splitlines()]


async def until(condition):
    """Wait for what no event announces."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


async def read_until(response, condition):
    """Read a stream until the bytes so far meet a condition, and return them."""
    seen = b""
    while not condition(seen):
        seen += await response.content.readany()
    return seen


def with_result(reply, result="Nothing."):
    """Return the message of a reply that calls a tool, and the tool's result."""
    message = reply["choices"][0]["message"]
    return [
        message,
        {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": result},
    ]


@asynccontextmanager
async def recording(rendering, run, *urls, key=None, killed=False, patience=0, **options):
    """Yield a client of an endpoint that records the calls of these engines. By default it waits
    for none that fails.

    A killed recorder leaves its files as they are.
    """
    write_metadata(run, rendering.digests)
    writer = RunWriter(run)
    options = RecorderOptions(out=run, engine=urls, model="m", patience=patience, **options)
    endpoint = Endpoint(rendering, writer, options, engine_key=key)
    await endpoint.start()
    try:
        async with Harness.connect(endpoint) as client:
            yield client
    finally:
        await endpoint.close()
    if not killed:
        writer.close()


class Harness:
    """A client that asks as session `s1` unless told otherwise."""

    def __init__(self, endpoint: Endpoint, client: aiohttp.ClientSession) -> None:
        self.endpoint = endpoint
        self.client = client
        self.run = endpoint.writer.run

    @classmethod
    @asynccontextmanager
    async def connect(cls, endpoint):
        async with aiohttp.ClientSession() as client:
            yield cls(endpoint, client)

    def url(self, path):
        return f"http://127.0.0.1:{self.endpoint.port}{path}"

    def post(self, body, *, path=PATH, session="s1", headers=None):
        headers = {**self.endpoint.headers(session, "api"), **(headers or {})}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.client.post(self.url(path), data=data, headers=headers)

    async def ask(self, *messages, **fields):
        """Return the status and the body of a reply that is not streamed."""
        status, text = await self.send({"model": "m", "messages": list(messages), **fields})
        return status, json.loads(text)

    async def send(self, body, **how):
        """Return the status and the text of a reply."""
        async with self.post(body, **how) as response:
            return response.status, await response.text()

    def committed(self, monkeypatch):
        """Return an event that is set when a call is committed."""
        committed = asyncio.Event()
        add_call = self.endpoint.writer.add_call

        def added(call):
            add_call(call)
            committed.set()

        monkeypatch.setattr(self.endpoint.writer, "add_call", added)
        return committed

    async def held(self, engine, say):
        """Ask and return the task, once the engine holds its reply `say`."""
        engine.replies.append(say)
        asked = asyncio.create_task(self.ask(user()))
        await asyncio.to_thread(engine.holding.wait)
        return asked

    async def get(self, path, headers=None):
        headers = {**self.endpoint.headers("s1", "api"), **(headers or {})}
        async with self.client.get(self.url(path), headers=headers) as response:
            return await response.json()

    async def end(self, session="s1", body=None):
        headers = self.endpoint.headers(session, "session.rolltap")
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        async with self.client.post(self.url("/end"), data=data, headers=headers) as response:
            return response.status, await response.text()

    async def stream(self, *messages, **fields):
        """Return the status and the events of a streamed reply."""
        body = {"model": "m", "messages": list(messages), "stream": True, **fields}
        status, text = await self.send(body)
        return status, [line.removeprefix("data: ") for line in text.split("\n\n") if line]

    def calls(self, session=None):
        rows = read_rows(self.run, "calls")
        return [call for call in rows if session in (None, call["session_id"])]

    def events(self, kind):
        return [event for event in read_rows(self.run, "events") if event["kind"] == kind]
