"""The model of `rolltap_model` is compared with what the engines serve, at start and at first
contact."""

import asyncio
import json
import logging
import shutil

import httpx
import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rolltap.addons.engine import client as engine_client
from rolltap.addons.engine import pool
from rolltap.addons.engine.own_model import TEXT, OwnModel, WrongModel
from rolltap.addons.engine.pool import require_model
from rolltap.addons.errors import EngineError
from rolltap.addons.prompts.rendering import Rendering
from tests.addons.endpoint.asking import refused, told
from tests.addons.engine.test_pool import NOBODY, statuses
from tests.addons.harness import user
from tests.scripted_engine import Answer, Say, ScriptedEngine


@pytest.fixture
def other_tokenizer(save_tokenizer, tokenizer, tmp_path):
    """A tokenizer with one more special token, as that of a model's next version."""
    save_tokenizer(tmp_path / "other", tokenizer.chat_template, ["<|eot_id|>"])
    return AutoTokenizer.from_pretrained(tmp_path / "other")


@pytest.fixture
def wrong(other_tokenizer):
    with ScriptedEngine(other_tokenizer) as engine:
        engine.otherwise = lambda request: Say("Hi.")
        yield engine


@pytest.fixture
def swapped(tokenizer, tmp_path):
    """Make a tokenizer with the first and the second of the tokens that `TEXT` does not have in
    each other's place."""

    def swap(first, second):
        shutil.copytree(tokenizer.name_or_path, tmp_path / "swapped")
        file = tmp_path / "swapped" / "tokenizer.json"
        content = json.loads(file.read_text())
        vocabulary = content["model"]["vocab"]
        unseen = set(vocabulary.values()).difference(tokenizer.encode(TEXT))
        names = [
            name
            for name in vocabulary
            if vocabulary[name] in unseen and len(name) > 1 and name.isascii()
        ]
        one = names[first]
        two = names[second]
        vocabulary |= {one: vocabulary[two], two: vocabulary[one]}
        file.write_text(json.dumps(content))
        return AutoTokenizer.from_pretrained(tmp_path / "swapped")

    return swap


def own_model(rendering):
    return OwnModel.of(rendering.model, rendering.tokenizer)


@pytest.fixture
async def client(connect, scripted_engine, rendering):
    return connect(scripted_engine.url, own=own_model(rendering))


def names_both(text, wrong, tokenizer_folder):
    """Return True when a message names the engine, its model, the recorder's and what to do."""
    parts = (
        wrong.url,
        wrong.root,
        str(tokenizer_folder),
        "give the model that the engine serves (--model",
    )
    return all(part in text for part in parts)


class TestVocabulary:
    @pytest.mark.parametrize("pair", [(0, 1), (0, -1)], ids=["neighbours", "far apart"])
    async def test_an_engine_with_two_swapped_tokens_that_a_text_does_not_show_is_refused(
        self, client, scripted_engine, swapped, pair
    ):
        scripted_engine.tokenizer = swapped(*pair)
        with pytest.raises(WrongModel):
            await client.served()

    async def test_a_large_vocabulary_is_asked_for_in_few_bounded_answers(self, connect, tmp_path):
        words = {f"tokenization{number}": number + 5 for number in range(150_000)}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(words, "tokenization0")),
            additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        )
        with ScriptedEngine(tokenizer) as engine:
            own = OwnModel.of("model", tokenizer)
            assert (await connect(engine.url, own=own).served()).max_model_len == 8192
        assert engine.asked.count("/detokenize") == 10

    async def test_an_engine_that_does_not_tell_texts_of_tokens_is_used_and_a_warning_names_it(
        self, client, scripted_engine
    ):
        scripted_engine.answers["/detokenize"] = Answer(404, "{}")
        assert (await client.served()).max_model_len == 8192
        assert "it has no route /detokenize (404)" in client.warning


class TestStart:
    def test_an_engine_with_another_tokenizer_refuses_the_start(
        self, start, wrong, tokenizer_folder, scripted_engine
    ):
        recorder = start(f"rolltap_engine={scripted_engine.url},{wrong.url}")
        assert recorder.address is None
        assert recorder.process.wait() == 1
        assert names_both(recorder.log(), wrong, tokenizer_folder)
        assert "Traceback" not in recorder.log()
        assert not recorder.run.exists()

    async def test_an_engine_that_does_not_answer_refuses_nothing(
        self, scripted_engine, rendering, monkeypatch, caplog
    ):
        monkeypatch.setattr(pool, "START_SECONDS", 0.1)
        scripted_engine.deaf = True
        assert await require_model([scripted_engine.url, NOBODY], None, own_model(rendering)) == []
        assert [message.count("does not answer yet") for message in caplog.messages] == [1, 1]

    async def test_the_same_tokenizer_under_another_name_is_a_warning(
        self, scripted_engine, rendering
    ):
        own = own_model(rendering)
        assert await require_model([scripted_engine.url], None, own) == []
        scripted_engine.root = "org/base-model"
        (warning,) = await require_model([scripted_engine.url], None, own)
        assert (
            f"the engine at {scripted_engine.url} serves org/base-model (as scripted), not"
            f" {own.name}" in warning
        )


class TestFirstContact:
    async def test_a_wrong_engine_is_an_error_and_a_fault(self, wrong, recorded, tokenizer_folder):
        async with recorded(wrong.url) as harness:
            status, answer = await harness.ask(user())
            (event,) = harness.events("fault")
        message = f"the engine at {wrong.url} serves another model than the recorder's"
        assert status == 502
        assert answer["error"]["message"] == message
        assert names_both(event["detail"], wrong, tokenizer_folder)
        assert wrong.requests == []

    async def test_sessions_move_from_a_wrong_engine_to_the_others(self, wrong, one, recorded):
        async with recorded(wrong.url, one.url) as harness:
            assert await statuses(harness) == {200}
        assert wrong.requests == []

    async def test_a_call_does_not_go_on_at_a_wrong_engine(self, wrong, one, recorded):
        async with recorded(wrong.url, one.url) as harness:
            of = harness.endpoint.engines.of
            session = next(f"s{n}" for n in range(100) if of(f"s{n}").url == one.url)
            one.replies.append(Say("one two three", break_after=2))
            assert (await harness.send({"messages": [user()]}, session=session))[0] == 502
        assert wrong.requests == []

    @pytest.mark.parametrize(
        "down", [True, False], ids=["was down", "is replaced while no call fails"]
    )
    async def test_an_engine_that_may_be_another_one_is_compared_again(
        self, one, recorded, other_tokenizer, tokenizer, monkeypatch, down
    ):
        async with recorded(one.url) as harness:
            await told(harness, user())
            one.tokenizer = other_tokenizer
            if down:
                engines = harness.endpoint.engines
                engines.failed(engines.of("s1"), EngineError("it is down", retryable=True))
            else:
                monkeypatch.setattr(engine_client, "AGAIN_SECONDS", 0.0)
            assert await refused(harness, user("More")) == (502, "engine_error")
            one.tokenizer = tokenizer
            await told(harness, user("More"))

    async def test_an_answer_that_was_under_way_when_the_engine_was_forgotten_is_not_kept(
        self, client, scripted_engine, monkeypatch
    ):
        begun = asyncio.Event()
        go = asyncio.Event()
        ask = client.ask

        async def slow(path, body=None):
            begun.set()
            await go.wait()
            return await ask(path, body)

        monkeypatch.setattr(client, "ask", slow)
        asked = asyncio.create_task(client.served())
        await begun.wait()
        client.forget()
        go.set()
        assert (await asked).max_model_len == 8192
        assert scripted_engine.asked.count("/v1/models") == 2

    async def test_an_engine_that_answered_once_and_is_too_busy_to_answer_again_is_used(
        self, client, scripted_engine, monkeypatch
    ):
        await client.served()
        monkeypatch.setattr(engine_client, "AGAIN_SECONDS", 0.0)
        scripted_engine.tokenize_status = 503
        assert (await client.served()).max_model_len == 8192

    @pytest.mark.parametrize("status", [404, 501])
    async def test_an_engine_without_the_route_is_used_and_a_warning_names_it(
        self, client, scripted_engine, status
    ):
        scripted_engine.tokenize_status = status
        assert (await client.served()).max_model_len == 8192
        assert "was not compared" in client.warning
        assert f"it has no route /tokenize ({status})" in client.warning

    @pytest.mark.parametrize("status", [400, 500])
    async def test_an_engine_that_does_not_tell_its_tokens_is_not_used(
        self, client, scripted_engine, status
    ):
        scripted_engine.tokenize_status = status
        message = rf"{scripted_engine.url}/tokenize did not return .*status {status}"
        with pytest.raises(EngineError, match=message) as error:
            await client.served()
        assert error.value.retryable == (status >= 500)


async def test_a_folder_is_the_same_model_under_each_of_its_paths(tokenizer_folder, tmp_path):
    (tmp_path / "link").symlink_to(tokenizer_folder)
    own = OwnModel(str(tokenizer_folder), [])
    assert own.is_named("scripted", str(tmp_path / "link"))
    assert not own.is_named("scripted", str(tmp_path))


@pytest.mark.engine
class TestContract:
    async def test_vllm_serves_the_model_that_it_was_started_with(self, engine, connect, caplog):
        caplog.set_level(logging.WARNING)
        own = own_model(Rendering(str(engine.model_dir)))
        assert await connect(engine.url, engine.key, own=own).served()
        assert caplog.records == []

    async def test_vllm_is_refused_for_a_model_with_another_tokenizer(
        self, engine, connect, other_tokenizer
    ):
        own = own_model(Rendering(other_tokenizer.name_or_path))
        with pytest.raises(WrongModel, match=str(engine.model_dir)):
            await connect(engine.url, engine.key, own=own).served()

    def test_the_scripted_engine_tokenizes_in_vllms_shape(self, engine, tokenizer):
        body = {"prompt": TEXT, "add_special_tokens": False}
        with ScriptedEngine(
            AutoTokenizer.from_pretrained(engine.model_dir), max_model_len=1
        ) as scripted:
            one, two = (
                httpx.post(url + "/tokenize", json=body, headers=engine.http.headers).json()
                for url in (engine.url, scripted.url)
            )
        assert one.pop("max_model_len") > two.pop("max_model_len")
        assert one == two

    def test_the_scripted_engine_refuses_an_unknown_adapter_as_vllm_does(
        self, engine, scripted_engine
    ):
        scripted_engine.adapters = set()
        body = {
            "token_ids": [5],
            "stream": True,
            "sampling_params": {"max_tokens": 1},
            "model": "policy-x",
        }
        answers = [
            httpx.post(url + "/inference/v1/generate", json=body, headers=engine.http.headers)
            for url in (engine.url, scripted_engine.url)
        ]
        assert [answer.status_code for answer in answers] == [404, 404]
        real, scripted = (answer.json()["error"] for answer in answers)
        for error in (real, scripted):
            assert error.pop("message").startswith("The model `policy-x` does not exist.")
        assert real == scripted
