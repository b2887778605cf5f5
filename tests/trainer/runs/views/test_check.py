import json
from collections import Counter
from dataclasses import replace
from io import StringIO

import pytest
import torch
from click.testing import CliRunner
from peft import LoraConfig, get_peft_model
from rich.console import Console
from transformers import Qwen3ForCausalLM

from rolltap.addons.engine.policy import POLICY_FILE
from rolltap.addons.errors import EngineError, InputError
from rolltap.addons.options import NEUTRAL_SAMPLING
from rolltap.addons.store.metadata import add_engine
from rolltap.addons.store.records import VersionSpan
from rolltap.trainer.cli.runs import check_command
from rolltap.trainer.engine.engines import Engines
from rolltap.trainer.engine.in_vllm.rolltap_owner import PATH
from rolltap.trainer.engine.publish import make_publisher
from rolltap.trainer.runs.views.check import (
    CheckReport,
    CheckRow,
    ScoredToken,
    choose,
    incomparable,
    summarize_scores,
)
from tests.factories import make_call, write_run
from tests.trainer.engine.acting import acting

SAMPLING = {
    **NEUTRAL_SAMPLING,
    "max_tokens": 12,
    "seed": 1,
    "stop_token_ids": [],
    "asked": {"temperature": 0.2},
}
SERVED = ({"default", "2"}, 100)
"""The served weight versions, and the context window."""
ADAPTER = "1a2b3c4d.1.0"


def call(call_id="c", kind="root", sampled=(5, 6), version="default", **fields):
    defaults = {
        "sampling": json.dumps(SAMPLING),
        "logprobs": [-0.5] * len(sampled),
        "kind": kind,
        "version": version,
    }
    return make_call(call_id, [1, 2], sampled, **{**defaults, **fields})


def check(run, url, *options):
    """Run `rolltap check`, and return its exit status and standard output. Raises the errors of
    users."""
    line = [str(run), "--engine", url, *options]
    ended = CliRunner().invoke(check_command, line, standalone_mode=False)
    if ended.exception and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    return ended.exit_code, ended.stdout


def report_of(run, url, *options):
    """Return the exit status of `rolltap check` and its report."""
    status, printed = check(run, url, "--json", *options)
    return status, json.loads(printed)


def sampling(**parameters):
    return {"sampling": json.dumps({**SAMPLING, **parameters})}


ACROSS = [VersionSpan(version="default", start=0, end=1), VersionSpan(version="2", start=1, end=2)]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"version": "2", "kind": "bridged"}, None),
        ({"status": "aborted"}, None),
        ({"sampled": (), "status": "aborted"}, "nothing sampled"),
        ({"violation": "the prompt has 9 tokens, but 2 can be rebuilt"}, "violation"),
        ({"logprobs": [-0.5]}, "violation"),
        (sampling(temperature=0.7), "not sampled neutrally"),
        (sampling(logit_bias={"5": 1}), "not sampled neutrally"),
        ({"sampling": "{}"}, "not sampled neutrally"),
        (sampling(structured_outputs={}), "sampled under a grammar"),
        ({"version": "1"}, "other weights"),
        ({"weight_versions": ACROSS}, "other weights"),
        ({"sampled": range(98)}, "too long for the engine"),
    ],
)
def test_a_neutrally_sampled_call_of_served_weights_can_be_compared_and_others_not_for_a_named_reason(
    fields, reason
):
    assert incomparable(call(**fields), *SERVED) == reason


CALLS = []
for kind, number in (("bridged", 50), ("rendered", 2), ("root", 9)):
    CALLS += [(kind, "s", f"{kind}{i}") for i in range(number)]


def test_a_sample_is_spread_over_the_kinds_and_depends_on_the_seed_and_not_on_the_order():
    chosen = choose(CALLS, 12, 0)
    assert Counter(kind for kind, _, _ in chosen) == {"root": 5, "bridged": 5, "rendered": 2}
    assert choose(CALLS[::-1], 12, 0) == chosen
    assert choose(CALLS, 12, 1) != chosen
    assert choose(CALLS, 1000, 0) == set(CALLS)


def test_differences_are_summed_up_by_kind_and_policy_version():
    scores = [
        (call("a", "bridged"), [-0.5, -0.5]),
        (call("b", "bridged"), [-0.5, -0.9]),
        (call("c", "bridged", version="2"), [-0.4, -0.5]),
        (call("d", "root"), [-0.5, -0.5]),
    ]
    root, second, first = summarize_scores(scores, 0.05)
    assert root == CheckRow("root", "default", 1, 2, 0.0, 0.0, 0.0, root.worst, within=True)
    worst = ScoredToken("s", "b", 1, -0.5, -0.9)
    largest = pytest.approx(0.4)
    assert first == CheckRow(
        "bridged", "default", 2, 4, pytest.approx(0.1), largest, 0.25, worst, within=False
    )
    assert second.policy_version == "2"
    assert second.mean_difference == pytest.approx(0.05)
    assert second.within
    printed = Console(file=StringIO(), width=200)
    printed.print(CheckReport("m", "m", 0.05, 0.01, [first], 1, {}), markup=False)
    assert "differs" in printed.file.getvalue()
    assert "[red]" not in printed.file.getvalue()


def sample(engine, call_id, prompt_ids, *, model=None, parameters=(), **fields):
    """Return a call that the engine samples after `prompt_ids`, with `parameters` in place of those
    of `SAMPLING`."""
    asked = {**SAMPLING, **dict(parameters), "logprobs": 0}
    del asked["asked"]
    body = {"token_ids": prompt_ids, "sampling_params": asked}
    if model:
        body["model"] = model
    answer = engine.http.post("/inference/v1/generate", json=body, timeout=120)
    [choice] = answer.raise_for_status().json()["choices"]
    sampled = {
        "version": "default",
        "logprobs": [entry["logprob"] for entry in choice["logprobs"]["content"]],
        "sampling": json.dumps(SAMPLING),
        **fields,
    }
    return make_call(call_id, prompt_ids, choice["token_ids"], **sampled)


def write(run, *calls, model="/models/recorded"):
    return write_run(run, *calls, model=str(model))


class TestWeights:
    """Whether an engine serves the weights that sampled a call."""

    SCORE = (-0.25, -0.5, -0.5)
    """Of the second token of the prompt, and of both completion tokens."""

    @pytest.fixture
    def engine(self, tmp_path):
        with acting(tmp_path / "model") as engine:
            names = ["model", f"policy-{ADAPTER}", "policy-1", "other"]
            engine.scores = dict.fromkeys(names, self.SCORE)
            yield engine

    def test_the_engine_s_own_weights_are_compared_where_its_model_is_the_recorded_one(
        self, engine, tmp_path
    ):
        run = write(tmp_path / "run", call(), model=engine.root)
        ended = CliRunner().invoke(check_command, [str(run), "--engine", engine.url])
        assert ended.exit_code == 0
        served = f"the engine at {engine.url} serves {engine.root}: its base weights\n"
        assert ended.stderr == served
        other = write(tmp_path / "other", call())
        add_engine(other, "http://e", {"model": str(engine.root)})
        assert check(other, engine.url)[0] == 0

    @pytest.mark.parametrize(
        ("sampled", "served", "adapter", "messages"),
        [
            ("default", None, None, ["weights default", "recorded with /models/recorded"]),
            # no names of a training: no proof on another model
            ("1", "1", None, [": the weights 1; "]),
            ("1", None, "policy-1", ["1 other weights"]),
            (ADAPTER, "ffffffff.1.0", None, [f"by the weights {ADAPTER}", "weights ffffffff.1.0"]),
        ],
    )
    def test_weights_of_another_model_or_training_are_named(
        self, engine, tmp_path, sampled, served, adapter, messages
    ):
        engine.version = served or engine.version
        if adapter:
            engine.adapters[adapter] = "/1"
        with pytest.raises(InputError) as refused:
            check(write(tmp_path / "run", call(version=sampled)), engine.url)
        for message in messages:
            assert message in str(refused.value)

    def test_the_version_of_a_training_is_proof_whatever_the_folder_is_called(
        self, engine, tmp_path
    ):
        engine.version = ADAPTER
        assert check(write(tmp_path / "run", call(version=ADAPTER)), engine.url)[0] == 0

    def test_every_loaded_adapter_of_the_training_is_compared(self, engine, tmp_path):
        engine.adapters = {f"policy-{ADAPTER}": "/a", "policy-other": "/b", "other": "/c"}
        run = write(tmp_path / "run", call(version=ADAPTER), call("d", version="other"))
        status, report = report_of(run, engine.url)
        assert status == 0
        assert report["skipped"] == {"other weights": 1}

    def test_every_engine_scores_a_share_of_the_calls(self, engine, tmp_path):
        run = write(tmp_path / "run", *(call(f"c{i}", version=ADAPTER) for i in range(4)))
        with acting(tmp_path / "model") as second:
            second.scores = engine.scores | {f"policy-{ADAPTER}": (-0.25, -0.5, -1.5)}
            for each in (engine, second):
                each.adapters[f"policy-{ADAPTER}"] = "/a"
            status, report = report_of(run, f"{engine.url},{second.url}")
        assert status == 1
        assert report["comparable"] == 4
        assert report["rows"][0]["calls"] == 4
        assert report["rows"][0]["mean_difference"] == pytest.approx(0.25)
        for each in (engine, second):
            prompts = [body["prompt"] for path, body in each.requests if path == "/v1/completions"]
            assert prompts.count([1, 2, 5, 6]) == 2

    @pytest.mark.parametrize(
        ("dtype", "rounding", "limit"),
        [
            ("bfloat16", 0.0, 0.01),
            ("bfloat16", 0.02, 0.06),
            ("bfloat16", 0.5, 0.1),
            ("float32", 0.0, 1e-4),
        ],
    )
    def test_the_limit_follows_the_type_and_the_engine_s_own_rounding(
        self, engine, tmp_path, dtype, rounding, limit
    ):
        engine.answers["/server_info"] = (200, f"dtype=torch.{dtype}")
        score = engine.route("/v1/completions")

        def rounded(method, body):
            answer = score(method, body)
            if len(body["prompt"]) > 4:  # the tokens that it sampled itself
                for entry in answer["choices"][0]["prompt_logprobs"][1:]:
                    for logprob in entry.values():
                        logprob["logprob"] -= rounding
            return answer

        engine.scores["model"] = (-0.5, -0.5, -0.5)
        engine.answers["/v1/completions"] = rounded
        run = write(tmp_path / "run", call(), model=engine.root)
        status, report = report_of(run, engine.url)
        assert status == 0
        assert report["threshold"] == pytest.approx(limit)
        assert report["rounding"] == pytest.approx(rounding)

    def test_an_engine_that_ends_by_scores_beside_other_calls_is_refused(self, engine, tmp_path):
        engine.answers["/server_info"] = {"vllm_config": {"lora_config": {"max_loras": 2}}}
        run = write(tmp_path / "run", call(), model=engine.root)
        assert check(run, engine.url)[0] == 0  # the register says that `rolltap serve` started it
        del engine.answers[PATH]
        with pytest.raises(EngineError, match=r"takes LoRA adapters, .* with `rolltap serve`, or"):
            check(run, engine.url)


@pytest.mark.engine
class TestOnARealEngine:
    @pytest.fixture(scope="class")
    @classmethod
    def calls(cls, engine):
        """Return one call of each kind."""
        root = sample(engine, "root", [5 + i % 100 for i in range(40)])
        known = root.prompt_ids + root.completion_ids
        place = {"parent_id": "root", "prefix_length": len(known)}
        bridged = sample(engine, "bridged", [*known, 7, 8, 9], kind="bridged", **place)
        return [root, bridged, sample(engine, "rendered", [9, 8, 7], kind="rendered")]

    @pytest.fixture
    def adapter(self, engine, tmp_path):
        """Publish an adapter, and unload it after the test. Its version is `ADAPTER`."""
        base = Qwen3ForCausalLM.from_pretrained(engine.model_dir, dtype=torch.float32)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = get_peft_model(base, config)
        publisher = make_publisher(
            "lora",
            Engines(engine.url),
            folder=tmp_path / "published",
            run=tmp_path,
            base=engine.model_dir,
            adapters=2,
        )
        name = publisher.publish(model, ADAPTER, lambda _: None)
        yield name
        engine.http.post("/v1/unload_lora_adapter", json={"lora_name": name}).raise_for_status()

    def test_sampled_calls_are_within_the_threshold_for_every_kind(self, engine, calls, tmp_path):
        run = write(tmp_path, *calls, model=engine.model_dir)
        status, report = report_of(run, engine.url, "--threshold", "1e-4")
        assert status == 0
        assert report["within"]
        rows = [(row["kind"], row["policy_version"], row["calls"]) for row in report["rows"]]
        assert rows == [(kind, "default", 1) for kind in ("root", "bridged", "rendered")]
        assert report["served_model"] == str(engine.model_dir)
        assert report["rows"][0]["tokens"] == len(calls[0].completion_ids)

    def test_a_changed_log_probability_is_found_and_its_kind_and_place_are_named(
        self, engine, calls, tmp_path
    ):
        root, bridged, rendered = calls
        logprobs = list(bridged.logprobs)
        logprobs[3] -= 2
        changed = replace(bridged, logprobs=logprobs)
        run = write(tmp_path, root, changed, rendered, model=engine.model_dir)
        status, output = check(run, engine.url)
        assert status == 1
        differs = "bridged, weights default: differs most at sampled token 3 of session s, call br"
        assert differs in output
        assert "root, weights" not in output

    def test_a_changed_prompt_is_found(self, engine, calls, tmp_path):
        root = calls[0]
        other = replace(root, prompt_ids=[*root.prompt_ids[:-1], 77])
        run = write(tmp_path, other, model=engine.model_dir)
        status, report = report_of(run, engine.url)
        assert status == 1
        assert not report["rows"][0]["within"]

    def test_skipped_calls_are_counted_by_reason(self, engine, calls, tmp_path):
        # an adapter that is not loaded
        (tmp_path / POLICY_FILE).write_text(json.dumps({"model": "policy-9", "version": "9"}))
        others = [call("x", version="7"), call("y", version="9"), call("z", sampling="{}")]
        run = write(tmp_path, *calls, *others, model=engine.model_dir)
        status, report = report_of(run, engine.url, "--sample", "2")
        assert status == 0
        assert report["skipped"] == {"other weights": 2, "not sampled neutrally": 1}
        assert report["comparable"] == 3
        assert sum(row["calls"] for row in report["rows"]) == 2

    # peft 0.21 uses a name that transformers 5.23 deprecates
    @pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
    def test_the_calls_of_an_adapter_are_scored_by_it(self, engine, adapter, calls, tmp_path):
        sampled = sample(engine, "lora", calls[0].prompt_ids, model=adapter, version=ADAPTER)
        run = write(tmp_path, calls[0], sampled, model=engine.model_dir)
        status, report = report_of(run, engine.url, "--threshold", "1e-4")
        assert status == 0
        assert [row["policy_version"] for row in report["rows"]] == [ADAPTER, "default"]

    def test_tokens_of_another_vocabulary_are_an_error_that_says_what_to_do(self, engine, tmp_path):
        run = write(tmp_path, call(sampled=(5, 999_999)), model=engine.model_dir)
        with pytest.raises(EngineError, match=r"out of vocabulary.*the model that run.json names"):
            check(run, engine.url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:9", r"no engine answers .*start it with `rolltap serve`"),
        ("{}/of-another-server", r"is it vLLM\? start it with `rolltap serve`"),
    ],
)
def test_an_engine_that_does_not_answer_as_vllm_is_an_error_that_says_what_to_do(
    tmp_path, scripted_engine, url, message
):
    with pytest.raises(EngineError, match=message):
        check(write(tmp_path, call()), url.format(scripted_engine.url))
