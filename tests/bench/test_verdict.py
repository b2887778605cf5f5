from dataclasses import replace

import pytest

from tests.bench.load import Received
from tests.bench.model import Divergence, Model
from tests.bench.verdict import judge
from tests.factories import START, make_call, says, write_run

REPLY = Received(session_id="s", call_id="c", text="Hello", calls=[], at=0.0, headers_seconds=None)
COUNTS = ("wrong", "mismatches", "missing", "differing", "doubles", "received", "unheard")
PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def model(tokenizer_folder):
    return Model(tokenizer_folder, 40, 60)


@pytest.fixture
def completion(model):
    return model.complete(PROMPT, [])


@pytest.fixture
def found(model, completion, tmp_path):
    """Return a function of replies, and of other fields than those of the call that the model
    samples. It returns the counts above 0 of the verdict on a run."""
    call = make_call("c", PROMPT, completion.token_ids, finish_reason="stop", reply=says("Hello"))
    call.logprobs = completion.logprobs

    def found(*replies, calls=1, **fields):
        # a recorder writes no call twice; two writers are two recorders
        for _ in range(calls):
            write_run(tmp_path, replace(call, **fields))
        before, after = judge(tmp_path, model, replies, START.timestamp() + 1)
        counts = {}
        for key in COUNTS:
            if count := getattr(before, key) + getattr(after, key):
                counts[key] = count
        return counts

    return found


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        ([REPLY], {"received": 1}),
        ([REPLY, replace(REPLY, call_id="d")], {"received": 2, "wrong": 1, "missing": 1}),
        ([replace(REPLY, text="Hallo")], {"received": 1, "wrong": 1, "differing": 1}),
        ([replace(REPLY, session_id="t")], {"received": 1, "wrong": 1, "differing": 1}),
        ([REPLY, REPLY], {"received": 2, "wrong": 1, "doubles": 1}),
        ([], {"unheard": 1}),
    ],
    ids=["right", "missing", "another text", "another session's", "of two requests", "unheard"],
)
def test_a_reply_is_compared_with_its_row(found, replies, expected):
    assert found(*replies) == expected


def test_a_reply_in_two_rows_is_found(found):
    assert found(REPLY, calls=2)["doubles"] == 1


def test_a_token_and_a_log_probability_that_differ_are_found(found, completion):
    ids = completion.token_ids
    logprobs = [*completion.logprobs[:-1], -0.5]
    counts = found(REPLY, completion_ids=[*ids[:-2], 9, ids[-1]], logprobs=logprobs)
    assert counts == {"received": 1, "wrong": 2, "mismatches": 2}


def test_a_completed_call_that_lacks_its_last_token_is_found(found, completion):
    ids = completion.token_ids[:-1]
    counts = found(REPLY, completion_ids=ids, logprobs=completion.logprobs[:-1])
    assert counts["mismatches"] == 1


def test_the_tokens_of_a_call_are_those_of_its_prompt(found):
    assert found(REPLY, prompt_ids=[1, 2, 4])["mismatches"] > 20


def test_an_engine_continues_a_reply_of_another_process_and_refuses_tokens_that_it_does_not_sample(
    model, tokenizer
):
    hello = [{"role": "user", "content": "Hello"}]
    how = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    prompt = tokenizer.apply_chat_template(hello, **how)
    completion, done = model.begin(prompt)
    assert done == 0
    for sampled in (4, 5, len(completion.token_ids) - 1):
        assert model.begin(prompt + completion.token_ids[:sampled]) == (completion, sampled)
    with pytest.raises(Divergence):
        model.begin([*prompt, *completion.token_ids[:10], 9])
