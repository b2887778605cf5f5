from dataclasses import replace
from datetime import UTC, datetime

import pytest

from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.records import Call, VersionSpan
from rolltap.addons.store.tables import RunWriter
from tests.bench.load import Received
from tests.bench.model import Divergence, Model
from tests.bench.verdict import judge

START = datetime(2026, 1, 1, tzinfo=UTC)
REPLY = Received(session_id="s", call_id="c", text="Hello", calls=[], at=0.0, headers_seconds=None)


@pytest.fixture(scope="module")
def model(tokenizer_folder):
    return Model(tokenizer_folder, 40, 60)


@pytest.fixture
def call(model):
    """Return a call whose tokens are those that the model samples."""
    prompt_ids = [1, 2, 3]
    completion = model.complete(prompt_ids, [])
    length = len(completion.token_ids)
    return Call(
        session_id="s",
        call_id="c",
        prompt_ids=prompt_ids,
        completion_ids=completion.token_ids,
        logprobs=completion.logprobs,
        weight_versions=[VersionSpan(version="default", start=0, end=length)],
        kind="root",
        status="completed",
        finish_reason="stop",
        reply='{"role": "assistant", "content": "Hello"}',
        started_at=START,
    )


@pytest.fixture
def verdict(model, tmp_path):
    """Return a function of calls and replies. It returns the verdict on a run of these calls."""

    def verdict(calls, replies):
        write_metadata(tmp_path, {})
        # a recorder writes no call twice; two writers are two recorders
        for call in calls:
            with RunWriter(tmp_path) as writer:
                writer.add_call(call)
        before, after = judge(tmp_path, model, replies, START.timestamp() + 1)
        return {key: getattr(before, key) + getattr(after, key) for key in COUNTS}

    return verdict


COUNTS = ("wrong", "mismatches", "missing", "differing", "doubles", "received", "unheard")


def found(**counts):
    return {**dict.fromkeys(COUNTS, 0), "received": 1, **counts}


def test_the_reply_of_a_recorded_call_is_right(verdict, call):
    assert verdict([call], [REPLY]) == found()


def test_a_token_and_a_log_probability_that_differ_are_found(verdict, call):
    call.completion_ids = [*call.completion_ids[:-2], 9, call.completion_ids[-1]]
    call.logprobs = [*call.logprobs[:-1], -0.5]
    assert verdict([call], [REPLY]) == found(wrong=2, mismatches=2)


def test_a_completed_call_that_lacks_its_last_token_is_found(verdict, call):
    call.completion_ids, call.logprobs = call.completion_ids[:-1], call.logprobs[:-1]
    assert verdict([call], [REPLY])["mismatches"] == 1


def test_the_tokens_of_a_call_are_those_of_its_prompt(verdict, call):
    call.prompt_ids = [1, 2, 4]
    assert verdict([call], [REPLY])["mismatches"] > 20


def test_a_reply_without_a_row_is_found(verdict, call):
    assert verdict([call], [REPLY, replace(REPLY, call_id="d")]) == found(received=2, wrong=1, missing=1)


def test_a_reply_that_differs_from_its_row_is_found(verdict, call):
    assert verdict([call], [replace(REPLY, text="Hallo")]) == found(wrong=1, differing=1)


def test_a_reply_of_another_session_is_found(verdict, call):
    assert verdict([call], [replace(REPLY, session_id="t")]) == found(wrong=1, differing=1)


def test_a_reply_that_answers_two_requests_is_found(verdict, call):
    assert verdict([call], [REPLY, REPLY]) == found(received=2, wrong=1, doubles=1)


def test_a_reply_in_two_rows_is_found(verdict, call):
    assert verdict([call, call], [REPLY])["doubles"] == 1


def test_a_completed_call_that_nobody_received_is_counted(verdict, call):
    assert verdict([call], []) == found(received=0, unheard=1)


def test_an_engine_continues_a_reply_of_another_process(model, encode_prompt):
    prompt = encode_prompt("Hello")
    completion, done = model.begin(prompt)
    assert done == 0
    for sampled in (4, 5, len(completion.token_ids) - 1):
        assert model.begin(prompt + completion.token_ids[:sampled]) == (completion, sampled)


def test_an_engine_refuses_to_continue_tokens_that_it_does_not_sample(model, encode_prompt):
    prompt = encode_prompt("Hello")
    completion, _ = model.begin(prompt)
    with pytest.raises(Divergence):
        model.begin([*prompt, *completion.token_ids[:10], 9])


@pytest.fixture
def encode_prompt(tokenizer):
    return lambda text: tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
