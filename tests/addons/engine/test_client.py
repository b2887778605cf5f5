"""The client against an engine that misbehaves, and the scripted engine against a real vLLM."""

import asyncio
import json
import re
import socket

import httpx
import pytest
from transformers import AutoTokenizer

from rolltap.addons.engine import client as module
from rolltap.addons.engine.client import Engine
from rolltap.addons.errors import EngineError
from rolltap.addons.options import NEUTRAL_SAMPLING
from rolltap.addons.store.records import VersionSpan
from tests.conftest import CONTEXT
from tests.scripted_engine import Answer, Say, ScriptedEngine


@pytest.fixture
async def client(connect, scripted_engine):
    return connect(scripted_engine.url)


async def generate(client: Engine, *, model: str | None = None, **sampling):
    """Return all chunks of a generation."""
    sampling = {**NEUTRAL_SAMPLING, "max_tokens": 64, **sampling}
    return [chunk async for chunk in client.generate([1, 2, 3], sampling, model)]


def ids_of(chunks):
    return [i for chunk in chunks for i in chunk.token_ids]


async def test_tokens_log_probabilities_and_versions_arrive_in_order(scripted_engine, client):
    scripted_engine.replies.append(Say("hello there", weight_version="7"))
    chunks = await generate(client)
    ids = [*scripted_engine.ids("hello there"), scripted_engine.tokenizer.eos_token_id]
    assert ids_of(chunks) == ids
    logprobs = [p for chunk in chunks for p in chunk.logprobs]
    assert logprobs == [-0.125 * (1 + i % 5) for i in range(len(ids))]
    assert chunks[-1].finish_reason == "stop"
    assert chunks[-1].weight_versions == [VersionSpan(version="7", start=0, end=len(ids))]


async def test_sampling_adapter_and_a_schema_with_an_integer_of_any_size_are_sent_as_given(
    scripted_engine, client
):
    scripted_engine.replies.append(Say("x"))
    schema = {"json": {"maximum": 2**70}}
    await generate(client, model="policy-3", structured_outputs=schema)
    (request,) = scripted_engine.requests
    assert request["model"] == "policy-3"
    sampling = {**NEUTRAL_SAMPLING, "max_tokens": 64, "structured_outputs": schema}
    assert request["sampling_params"] == {**sampling, "logprobs": 0, "stream_interval": 8}


@pytest.mark.parametrize(
    ("reply", "status", "message"),
    [
        (Answer(404, "no such route"), 502, "needs vLLM 0.32 or newer with --enable-scale-out"),
        (Answer(200, '{"choices": [{"token_ids": null}]}'), 502, "invalid event"),
        (Answer(200, '{"choices": [], "usage": null}'), 502, "without a finish reason"),
        (Say("one two three four", break_after=2), 503, "failed"),
    ],
)
async def test_a_reply_that_is_not_a_generation_is_an_error(
    scripted_engine, client, reply, status, message
):
    scripted_engine.replies.append(reply)
    with pytest.raises(EngineError, match=message) as error:
        await generate(client)
    assert error.value.status == status


async def test_an_engine_that_is_down_and_a_server_that_is_not_vllm_are_errors(
    scripted_engine, connect
):
    with pytest.raises(EngineError, match="elsewhere/v1/models did not return a model"):
        await connect(scripted_engine.url + "/elsewhere").served()
    engine = connect("http://127.0.0.1:9")
    with pytest.raises(EngineError, match="failed"):
        await generate(engine)
    with pytest.raises(EngineError, match="cannot be reached"):
        await engine.served()


async def test_an_engine_that_sends_no_headers_and_no_health_is_an_error(
    scripted_engine, client, monkeypatch
):
    monkeypatch.setattr(module, "SILENCE_SECONDS", 0.01)
    monkeypatch.setattr(module, "HEALTH_SECONDS", 0.1)
    scripted_engine.deaf = True
    with pytest.raises(EngineError, match="says nothing") as error:
        await generate(client)
    assert error.value.retryable


async def test_a_healthy_engine_is_waited_for_before_it_sends_headers(
    scripted_engine, client, monkeypatch
):
    monkeypatch.setattr(module, "SILENCE_SECONDS", 0.01)
    answers = [True, True, False]

    async def healthy():
        return answers.pop(0)

    monkeypatch.setattr(client, "healthy", healthy)
    scripted_engine.deaf = True
    with pytest.raises(EngineError, match="says nothing"):
        await generate(client)
    assert answers == []


async def test_one_connection_carries_generations_one_after_the_other(
    scripted_engine, client, monkeypatch
):
    """The last event is not the end of the response: the client waits for that."""
    monkeypatch.setattr(module, "END_SECONDS", 120.0)
    reading = asyncio.Event()
    read = client.read

    async def rest(response):
        reading.set()
        return await read(response)

    monkeypatch.setattr(client, "read", rest)
    scripted_engine.replies += [Say("one", hold_end=True), Say("two"), Say("three")]
    first = asyncio.create_task(generate(client))
    await reading.wait()
    scripted_engine.release()
    await first
    await generate(client)
    await generate(client)
    assert len(scripted_engine.peers) == 1


def test_a_connection_is_probed_while_nothing_is_sent_on_it():
    """An engine whose machine is gone closes no connection."""
    with module._socket_with_probes(
        (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 9))
    ) as opened:
        assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10


class TestKey:
    @pytest.fixture
    def locked(self, tokenizer):
        with ScriptedEngine(tokenizer, key="open-sesame") as engine:
            engine.otherwise = lambda request: Say("x")
            yield engine

    async def test_every_request_has_the_key(self, locked, connect):
        engine = connect(locked.url, "open-sesame")
        assert (await engine.served()).max_model_len == 8192
        assert await generate(engine)
        assert await engine.describe()

    @pytest.mark.parametrize(
        ("key", "message"), [(None, "requires a key"), ("guess", "does not accept the key")]
    )
    async def test_a_wrong_key_is_an_error_that_says_what_to_do(
        self, locked, connect, key, message
    ):
        engine = connect(locked.url, key)
        for ask in (engine.served, lambda: generate(engine)):
            with pytest.raises(
                EngineError, match=rf"{message} \(401\): set ROLLTAP_ENGINE_KEY_FILE"
            ) as error:
                await ask()
            assert (error.value.status, error.value.retryable) == (502, False)
            assert "guess" not in str(error.value)


async def test_log_probabilities_of_other_tokens_are_dropped(scripted_engine, client):
    choice = {
        "token_ids": [5],
        "logprobs": {"content": [{"token_id": 6, "logprob": -1.0}]},
        "finish_reason": "stop",
    }
    scripted_engine.replies.append(Answer(200, json.dumps({"choices": [choice]})))
    (chunk,) = await generate(client)
    assert (chunk.token_ids, chunk.logprobs) == ([5], [])


def shape(value):
    """Return the keys and types of a JSON value. For a list, return the set of its items'
    shapes."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value[:1]]
    return type(value).__name__


def events(url: str, body: dict, headers: httpx.Headers) -> list:
    with httpx.stream(
        "POST", url + "/inference/v1/generate", json=body, headers=headers, timeout=600
    ) as response:
        assert response.status_code == 200
        return [line[6:] for line in response.iter_lines() if line.startswith("data: ")]


@pytest.mark.engine
class TestContract:
    """The scripted engine and vLLM agree where the tests rely on the scripted engine."""

    def test_the_scripted_engine_streams_in_vllms_shape(self, engine, scripted_engine):
        sampling = {**NEUTRAL_SAMPLING, "max_tokens": 3, "logprobs": 0, "ignore_eos": True}
        body = {"token_ids": [5, 6, 7], "stream": True, "sampling_params": sampling}
        scripted_engine.replies.append(Say("one two", finish_reason="length"))
        real = []
        while len(real) < 3:  # a busy vLLM can send all tokens in one event
            real = events(engine.url, body, engine.http.headers)
        scripted = events(scripted_engine.url, body, engine.http.headers)
        assert real[-1] == scripted[-1] == "[DONE]"
        # vLLM repeats the sampled token's entry under top_logprobs; the client does not read it
        for data in (real, scripted):
            data[:] = [json.loads(event) for event in data[:-1]]
            for event in data:
                event["choices"][0]["logprobs"]["content"][0]["top_logprobs"] = []
        assert shape(real[0]) == shape(scripted[0])
        assert shape(real[-1]) == shape(scripted[-1])

    def test_both_engines_list_their_model_with_its_context_window(self, engine, scripted_engine):
        for url, window in ((engine.url, CONTEXT), (scripted_engine.url, 8192)):
            (model,) = httpx.get(url + "/v1/models", headers=engine.http.headers).json()["data"]
            assert model["parent"] is None
            assert model["max_model_len"] == window

    def test_vllm_refuses_in_the_stream(self, engine):
        body = {"token_ids": [10**6], "stream": True, "sampling_params": {"max_tokens": 1}}
        first, *_ = events(engine.url, body, engine.http.headers)
        assert json.loads(first)["error"]["code"] == 400

    def test_a_paused_vllm_refuses_in_the_stream_or_lets_requests_wait(
        self, engine, scripted_engine
    ):
        body = {"token_ids": [5, 6, 7], "stream": True, "sampling_params": {"max_tokens": 1}}
        version = engine.http.get("/version").json()["version"]
        if version.startswith("0.32."):
            pytest.skip("vLLM 0.32 lets requests wait")
        engine.http.post("/pause?mode=wait")
        try:
            real = events(engine.url, body, engine.http.headers)
            assert engine.http.get("/is_paused").json() == {"is_paused": True}
        finally:
            engine.http.post("/resume")
        scripted_engine.paused = True
        assert real == events(scripted_engine.url, body, engine.http.headers)

    @pytest.fixture
    async def real(self, connect, engine):
        return connect(engine.url, engine.key)

    async def test_vllm_says_what_it_is(self, real):
        described = await real.describe()
        assert described["model"] in described["configuration"]
        assert described["max_model_len"] == (await real.served()).max_model_len
        assert re.match(r"0\.\d+", described["vllm"])

    async def test_the_client_reads_vllm(self, real):
        chunks = await generate(real)
        ids = ids_of(chunks)
        assert len(ids) == sum(len(chunk.logprobs) for chunk in chunks)
        (versions,) = [chunk.weight_versions for chunk in chunks if chunk.weight_versions]
        assert versions[-1].end == len(ids)
        assert chunks[-1].cached_tokens is not None

    async def test_vllm_names_the_stop_text_and_keeps_its_tokens(self, engine, real):
        ids = ids_of(await generate(real, max_tokens=24, seed=3))
        text = AutoTokenizer.from_pretrained(engine.model_dir).decode(ids, skip_special_tokens=True)
        stop = next(text[i : i + 2] for i in range(4, len(text) - 2) if text[i : i + 2].isascii())
        cut = await generate(real, max_tokens=24, seed=3, stop=[stop])
        sampled = ids_of(cut)
        assert sampled == ids[: len(sampled)]
        assert len(sampled) < len(ids)
        assert [chunk.stop for chunk in cut if chunk.stop] == [stop]
        assert sum(len(chunk.logprobs) for chunk in cut) == len(sampled)

    async def test_vllm_follows_a_schema(self, engine, real):
        schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
        ids = ids_of(await generate(real, max_tokens=200, structured_outputs={"json": schema}))
        text = AutoTokenizer.from_pretrained(engine.model_dir).decode(ids, skip_special_tokens=True)
        assert json.loads(text)["n"] in (1, 2)

    async def test_vllm_says_one_of_the_texts(self, engine, real):
        ids = ids_of(
            await generate(
                real, max_tokens=200, structured_outputs={"choice": ["yes, it is", "no"]}
            )
        )
        text = AutoTokenizer.from_pretrained(engine.model_dir).decode(ids, skip_special_tokens=True)
        assert text in ("yes, it is", "no")
