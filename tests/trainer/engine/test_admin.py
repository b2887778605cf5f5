"""The client against fixed answers. `test_publish.py` and `views/test_check.py` test it against
vLLM."""

import re
from operator import methodcaller
from pathlib import Path

import pytest

from rolltap.addons.errors import EngineError, InputError
from rolltap.addons.options import NEUTRAL_SAMPLING
from rolltap.trainer.engine.admin import EngineAdmin, Load, Models
from rolltap.trainer.training.online import typed_recipe
from rolltap.trainer.training.recipe import Recipe
from tests.trainer.engine.acting import UNKNOWN

BASE = {"id": "tiny", "root": "/models/tiny", "parent": None, "max_model_len": 4096}
ADAPTER = {"id": "policy-1", "root": "/published/policy-1", "parent": "tiny", "max_model_len": None}


@pytest.fixture
def admin(answering):
    return EngineAdmin(answering.url + "/")


@pytest.mark.parametrize("cards", [[BASE, ADAPTER], [ADAPTER, BASE]])
def test_the_base_model_is_the_one_without_a_parent(answering, admin, cards):
    answering.answers["/v1/models"] = {"object": "list", "data": cards}
    assert admin.models() == Models("tiny", "/models/tiny", 4096, frozenset({"policy-1"}))


def test_a_completion_is_scored_by_the_log_probabilities_of_its_own_tokens(answering, admin):
    entries = [
        None,
        {"2": {"logprob": -9.0}},
        {"3": {"logprob": -0.5}, "8": {"logprob": -0.1}},
        {"4": {"logprob": -2}},
    ]
    answering.answers["/v1/completions"] = {"choices": [{"prompt_logprobs": entries}]}
    assert admin.score("tiny", [1, 2], [3, 4]) == [-0.5, -2]
    ((_, body),) = answering.requests
    assert (body["model"], body["prompt"], body["prompt_logprobs"]) == ("tiny", [1, 2, 3, 4], 0)
    with pytest.raises(EngineError, match=r"it is not vLLM 0\.32 or newer"):
        admin.score("tiny", [1], [3, 4])


def test_tokens_are_sampled_neutrally_and_each_has_its_log_probability(answering, admin):
    entries = [{"logprob": -0.5}, {"logprob": -2}]
    choice = {"token_ids": [3, 4], "logprobs": {"content": entries}}
    answering.answers["/inference/v1/generate"] = {"choices": [choice]}
    assert admin.sample("tiny", [1, 2], 2) == ([3, 4], [-0.5, -2.0])
    ((_, body),) = answering.requests
    assert (body["model"], body["token_ids"]) == ("tiny", [1, 2])
    expected = {**NEUTRAL_SAMPLING, "max_tokens": 2, "logprobs": 0, "ignore_eos": True}
    assert body["sampling_params"] == expected
    fewer = {"logprobs": {"content": entries[:1]}}
    for wrong in ({"token_ids": [3]}, {"token_ids": [3, 4, 5]}, fewer):
        answering.answers["/inference/v1/generate"] = {"choices": [choice | wrong]}
        with pytest.raises(EngineError, match=r"it is not vLLM 0\.32 or newer"):
            admin.sample("tiny", [1, 2], 2)


def test_an_engine_that_says_it_is_not_healthy_is_not(answering, admin):
    assert admin.healthy()
    answering.answers["/health"] = (503, "")
    assert not admin.healthy()
    assert not EngineAdmin("http://127.0.0.1:9").healthy()


@pytest.mark.parametrize(
    ("answer", "dtype"),
    [
        ({"vllm_config": "m, dtype=torch.bfloat16, kv_cache_dtype=auto"}, "bfloat16"),
        ({"vllm_config": "m, dtype=torch.float16"}, None),  # nothing is trained in it
        ((404, "no development routes"), None),
    ],
)
def test_an_engine_tells_the_type_in_which_it_computes(answering, admin, answer, dtype):
    answering.answers["/server_info"] = answer
    assert admin.dtype() == dtype


def test_a_temperature_needs_log_probabilities_at_it(answering, admin):
    config = {"logprobs_mode": "processed_logprobs"}
    answering.answers["/server_info"] = {"vllm_config": {"model_config": config}}
    admin.require_processed()
    config["logprobs_mode"] = "raw_logprobs"
    fix = r"reports raw_logprobs, .* --logprobs-mode processed_logprobs, or remove"
    with pytest.raises(EngineError, match=fix):
        admin.require_processed()


def test_a_recipe_without_a_type_takes_its_engines(answering):
    answering.answers["/server_info"] = {"vllm_config": "dtype=torch.bfloat16"}
    recipe = Recipe(model=Path("m"), steps=1)
    assert typed_recipe(recipe, answering.url).dtype == "bfloat16"
    own = recipe.model_copy(update={"dtype": "float32"})
    assert typed_recipe(own, answering.url) == own
    assert typed_recipe(recipe, "http://127.0.0.1:9") == recipe  # no server listens there


def test_a_vllm_that_is_too_old_says_what_is_missing(answering, admin):
    admin.require_endpoints()
    answering.answers["/openapi.json"] = {"paths": {"/collective_rpc": {}}}
    answering.answers["/version"] = {"version": "0.20.0"}
    lacks = r"vLLM 0\.20\.0 .* lacks /inference/v1/generate .*needs vLLM 0\.32"
    with pytest.raises(EngineError, match=lacks):
        admin.require_endpoints()


def test_what_an_engine_says_of_its_state_counts(answering, admin):
    answering.answers |= {
        "/is_paused": {"is_paused": True},
        "/reset_prefix_cache": {"success": False},
        "/update_weight_version": {},
        "/weight_info": {"weight_version": "6"},
    }
    assert admin.is_paused() is True
    with pytest.raises(EngineError, match="kept its prefix cache"):
        admin.reset_prefix_cache()
    with pytest.raises(EngineError, match="serves version '6' after '7' was published"):
        admin.set_weight_version("7")


WEIGHTS = "/weight_info"
MODELS = "/v1/models"
LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"
SCORE = methodcaller("score", "a", [1], [2])
LOAD_ADAPTER = methodcaller("load_adapter", "a", Path("/a"))
UNLOAD_ADAPTER = methodcaller("unload_adapter", "a")
RELOAD = methodcaller("reload_weights", Path("/a"))
BY_SERVE = "404 .*start it with `rolltap serve`, or with VLLM_SERVER_DEV_MODE=1"
HIGHER_RANK = "`rolltap serve --lora-rank` of that rank or more, or set a smaller lora.r"
NOT_VLLM = r"it is not vLLM 0\.32"


@pytest.mark.parametrize(
    ("ask", "path", "answer", "message"),
    [
        (EngineAdmin.weight_version, WEIGHTS, None, BY_SERVE),
        (EngineAdmin.weight_version, WEIGHTS, (200, "<html>"), f"'<html>' .*: {NOT_VLLM}"),
        (EngineAdmin.weight_version, WEIGHTS, {"version": 1}, f"KeyError.*: {NOT_VLLM}"),
        (EngineAdmin.models, MODELS, {"data": []}, f"StopIteration.*: {NOT_VLLM}"),
        (EngineAdmin.models, MODELS, (307, ""), r"GET http\S+/v1/models: 307 ; see the engine's"),
        (LOAD_ADAPTER, LOAD, None, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        (LOAD_ADAPTER, LOAD, UNKNOWN, "folder under the same path"),
        (LOAD_ADAPTER, LOAD, (400, "LoRA rank 32 is greater than max_lora_rank 16."), HIGHER_RANK),
        (UNLOAD_ADAPTER, UNLOAD, UNKNOWN, "cannot be found.*; see the engine's log"),
        (SCORE, "/v1/completions", UNKNOWN, "was unloaded while it was checked: check again"),
        (SCORE, "/v1/completions", (400, "out of vocabulary"), "the model that run.json names"),
        (RELOAD, "/collective_rpc", (500, "boom"), "500 boom; see the engine.s log"),
    ],
)
def test_an_error_names_the_request_the_answer_and_what_to_do(
    answering, admin, ask, path, answer, message
):
    if answer is not None:
        answering.answers[path] = answer
    with pytest.raises(EngineError, match=message) as raised:
        ask(admin)
    assert re.search(f"{re.escape(admin.url + path)}\\b", str(raised.value))


def test_an_address_without_a_server_is_an_error_that_says_what_to_do():
    fix = "no engine answers .*start it with `rolltap serve`, or give its URL"
    with pytest.raises(EngineError, match=fix):
        EngineAdmin("http://127.0.0.1:9").models()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("foo", "is 'foo': give a URL such as http://127.0.0.1:8000"),
        ("localhost:8000", "is 'localhost:8000': give a URL such as"),
        ("http://localhost:8000/v1", "is 'http://localhost:8000/v1': leave out /v1"),
        ("http://[", "Invalid IPv6 URL"),
    ],
)
def test_a_text_that_is_no_url_of_an_engine_is_refused_before_it_is_asked(url, why):
    with pytest.raises(InputError, match=f"the engine's URL {re.escape(why)}"):
        EngineAdmin(url)


METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 4.0
# TYPE vllm:num_preemptions_created gauge
vllm:num_preemptions_created{engine="0",model_name="m"} 1.7e+09
"""


def test_an_engine_tells_its_load_of_all_replicas_together(answering, admin):
    answering.answers["/metrics"] = (200, METRICS)
    assert admin.load() == Load(running=5, waiting=7, cache=0.75, preemptions=4)
    answering.answers["/metrics"] = (200, METRICS.replace("num_requests_waiting", "something"))
    with pytest.raises(EngineError, match=r"does not tell its load .*vllm:num_requests_waiting"):
        admin.load()
