import json
import socket
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
from rolltap.trainer.runs.views.check import CheckReport, choose, incomparable, summarize_scores
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
    fields = {
        "sampling": json.dumps(SAMPLING),
        "logprobs": [-0.5] * len(sampled),
        "kind": kind,
    } | fields
    return make_call(call_id, [1, 2], sampled, version=version, **fields)


def check(run, url, *options):
    """Run `rolltap check` and return its exit status and standard output. Raises the errors of
    users."""
    ended = CliRunner().invoke(
        check_command, [str(run), "--engine", url, *options], standalone_mode=False
    )
    if ended.exception and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    return ended.exit_code, ended.stdout


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
        ({"sampling": json.dumps({**SAMPLING, "temperature": 0.7})}, "not sampled neutrally"),
        ({"sampling": json.dumps({**SAMPLING, "logit_bias": {"5": 1}})}, "not sampled neutrally"),
        ({"sampling": "{}"}, "not sampled neutrally"),
        (
            {"sampling": json.dumps({**SAMPLING, "structured_outputs": {}})},
            "sampled under a grammar",
        ),
        ({"version": "1"}, "other weights"),
        ({"weight_versions": ACROSS}, "other weights"),
        ({"sampled": range(98)}, "too long for the engine"),
    ],
)
def test_a_neutrally_sampled_call_of_served_weights_can_be_compared_and_others_not_for_a_named_reason(
    fields, reason
):
    assert incomparable(call(**fields), *SERVED) == reason


class TestSample:
    CALLS = tuple(
        (kind, "s", f"{kind}{i}")
        for kind, n in (("bridged", 50), ("rendered", 2), ("root", 9))
        for i in range(n)
    )

    def test_it_is_spread_over_the_kinds_as_far_as_there_are_calls(self):
        kinds = Counter(kind for kind, _, _ in choose(self.CALLS, 12, 0))
        assert kinds == {"root": 5, "bridged": 5, "rendered": 2}
        assert choose(self.CALLS, 1000, 0) == set(self.CALLS)

    def test_it_depends_on_the_seed_and_not_on_the_order_of_the_calls(self):
        assert (
            choose(self.CALLS, 12, 0)
            == choose(self.CALLS[::-1], 12, 0)
            != choose(self.CALLS, 12, 1)
        )


def test_differences_are_summed_up_by_kind_and_policy_version():
    scores = [
        (call("a", "bridged"), [-0.5, -0.5]),
        (call("b", "bridged"), [-0.5, -0.9]),
        (call("c", "bridged", version="2"), [-0.4, -0.5]),
        (call("d", "root"), [-0.5, -0.5]),
    ]
    root, second, first = summarize_scores(scores, 0.05)
    assert (root.kind, root.mean_difference, root.within) == ("root", 0.0, True)
    assert (first.kind, first.policy_version, first.calls, first.tokens) == (
        "bridged",
        "default",
        2,
        4,
    )
    assert first.mean_difference == pytest.approx(0.1)
    assert first.max_difference == pytest.approx(0.4)
    assert (first.share_over_threshold, first.within) == (0.25, False)
    assert (first.worst.call_id, first.worst.position, first.worst.scored) == ("b", 1, -0.9)
    assert (second.policy_version, second.mean_difference, second.within) == (
        "2",
        pytest.approx(0.05),
        True,
    )


def test_a_row_that_differs_is_marked_without_markup():
    rows = summarize_scores([(call("a"), [-0.5, -9.0])], 0.05)
    report = CheckReport("m", "m", 0.05, 0.01, rows, 1, {})
    Console(file=(printed := StringIO()), width=200).print(report, markup=False)
    assert "differs" in printed.getvalue()
    assert "[red]" not in printed.getvalue()


def sample(engine, call_id, prompt_ids, *, model=None, parameters=(), **fields):
    """Return a call that the engine samples after `prompt_ids`, with `parameters` in place of those
    of `SAMPLING`."""
    parameters = {
        name: value for name, value in (SAMPLING | dict(parameters)).items() if name != "asked"
    }
    body = {"token_ids": prompt_ids, "sampling_params": {**parameters, "logprobs": 0}}
    body |= {"model": model} if model else {}
    answer = (
        engine.http.post("/inference/v1/generate", json=body, timeout=60).raise_for_status().json()
    )
    ids = answer["choices"][0]["token_ids"]
    logprobs = [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]
    sampled = {
        "version": "default",
        "logprobs": logprobs,
        "sampling": json.dumps(SAMPLING),
        **fields,
    }
    return make_call(call_id, prompt_ids, ids, **sampled)


def write(run, calls, model="/models/recorded"):
    return write_run(run, *calls, model=str(model))


class TestWeights:
    """Whether an engine serves the weights that sampled a call."""

    SCORE = (-0.25, -0.5, -0.5)
    """Of the second token of the prompt, and of both completion tokens."""

    @pytest.fixture
    def engine(self, tmp_path):
        with acting(tmp_path / "model") as engine:
            engine.scores = dict.fromkeys(
                ["model", f"policy-{ADAPTER}", "policy-1", "other"], self.SCORE
            )
            yield engine

    def test_the_command_says_what_the_engine_serves(self, engine, tmp_path):
        run = write(tmp_path / "run", [call()], engine.root)
        ended = CliRunner().invoke(check_command, [str(run), "--engine", engine.url])
        assert (
            ended.stderr == f"the engine at {engine.url} serves {engine.root}: its base weights\n"
        )

    def test_the_engine_s_own_weights_are_compared_where_its_model_is_the_recorded_one(
        self, engine, tmp_path
    ):
        assert check(write(tmp_path / "run", [call()], engine.root), engine.url)[0] == 0
        add_engine(write(tmp_path / "other", [call()]), "http://e", {"model": str(engine.root)})
        assert check(tmp_path / "other", engine.url)[0] == 0

    @pytest.mark.parametrize(
        ("sampled", "served", "adapters", "messages"),
        [
            (
                "default",
                None,
                [],
                ["sampled by the weights default", "the run was recorded with /models/recorded"],
            ),
            # no names of a training: no proof on another model
            ("1", "1", [], [": the weights 1; "]),
            ("1", None, ["policy-1"], ["1 other weights"]),
            (
                "1a2b3c4d.1.0",
                "ffffffff.1.0",
                [],
                ["sampled by the weights 1a2b3c4d.1.0", "the weights ffffffff.1.0"],
            ),
        ],
    )
    def test_weights_of_another_model_or_training_are_named(
        self, engine, tmp_path, sampled, served, adapters, messages
    ):
        engine.version = served or engine.version
        engine.adapters |= dict.fromkeys(adapters, "/1")
        with pytest.raises(InputError) as refused:
            check(write(tmp_path / "run", [call(version=sampled)]), engine.url)
        assert [message for message in messages if message not in str(refused.value)] == []

    def test_the_version_of_a_training_is_proof_whatever_the_folder_is_called(
        self, engine, tmp_path
    ):
        engine.version = ADAPTER
        assert check(write(tmp_path / "run", [call(version=ADAPTER)]), engine.url)[0] == 0

    def test_every_loaded_adapter_of_the_training_is_compared(self, engine, tmp_path):
        engine.adapters = {f"policy-{ADAPTER}": "/a", "policy-other": "/b", "other": "/c"}
        run = write(tmp_path / "run", [call(version=ADAPTER), call("d", version="other")])
        status, output = check(run, engine.url, "--json")
        assert (status, json.loads(output)["skipped"]) == (0, {"other weights": 1})

    def test_every_engine_scores_a_share_of_the_calls(self, engine, tmp_path):
        run = write(tmp_path / "run", [call(f"c{i}", version=ADAPTER) for i in range(4)])
        with acting(tmp_path / "model") as second:
            second.scores = engine.scores | {f"policy-{ADAPTER}": (-0.25, -0.5, -1.5)}
            for each in (engine, second):
                each.adapters[f"policy-{ADAPTER}"] = "/a"
            status, output = check(run, f"{engine.url},{second.url}", "--json")
        report = json.loads(output)
        assert (status, report["comparable"], report["rows"][0]["calls"]) == (1, 4, 4)
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
        status, output = check(write(tmp_path / "run", [call()], engine.root), engine.url, "--json")
        report = json.loads(output)
        assert status == 0
        assert (report["threshold"], report["rounding"]) == (
            pytest.approx(limit),
            pytest.approx(rounding),
        )

    def test_an_engine_that_ends_by_scores_beside_other_calls_is_refused(self, engine, tmp_path):
        engine.answers["/server_info"] = {"vllm_config": {"lora_config": {"max_loras": 2}}}
        run = write(tmp_path / "run", [call()], engine.root)
        assert check(run, engine.url)[0] == 0  # the register says that `rolltap serve` started it
        del engine.answers[PATH]
        with pytest.raises(
            EngineError, match=r"takes LoRA adapters, .* start it with `rolltap serve`, or without"
        ):
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
        folder = tmp_path / "published"
        publisher = make_publisher(
            "lora",
            Engines(engine.url),
            folder=folder,
            run=tmp_path,
            base=engine.model_dir,
            adapters=2,
        )
        name = publisher.publish(model, ADAPTER, lambda _: None)
        yield name
        engine.http.post("/v1/unload_lora_adapter", json={"lora_name": name}).raise_for_status()

    def test_sampled_calls_are_within_the_threshold_for_every_kind(self, engine, calls, tmp_path):
        status, output = check(
            write(tmp_path, calls, engine.model_dir), engine.url, "--threshold", "1e-4", "--json"
        )
        report = json.loads(output)
        assert (status, report["within"]) == (0, True)
        rows = [(row["kind"], row["policy_version"], row["calls"]) for row in report["rows"]]
        assert rows == [(kind, "default", 1) for kind in ("root", "bridged", "rendered")]
        assert report["served_model"] == str(engine.model_dir)
        assert report["rows"][0]["tokens"] == len(calls[0].completion_ids)

    def test_a_changed_log_probability_is_found_and_its_kind_and_place_are_named(
        self, engine, calls, tmp_path
    ):
        root, bridged, rendered = calls
        changed = replace(
            bridged,
            logprobs=[*bridged.logprobs[:3], bridged.logprobs[3] - 2, *bridged.logprobs[4:]],
        )
        status, output = check(
            write(tmp_path, [root, changed, rendered], engine.model_dir), engine.url
        )
        assert status == 1
        assert (
            "bridged, weights default: differs most at sampled token 3 of session s, call bridged:"
            in output
        )
        assert "root, weights" not in output

    def test_a_changed_prompt_is_found(self, engine, calls, tmp_path):
        root = calls[0]
        other = replace(root, prompt_ids=[*root.prompt_ids[:-1], 77])
        status, output = check(write(tmp_path, [other], engine.model_dir), engine.url, "--json")
        assert (status, json.loads(output)["rows"][0]["within"]) == (1, False)

    def test_skipped_calls_are_counted_by_reason(self, engine, calls, tmp_path):
        others = [call("x", version="7"), call("y", version="8"), call("z", sampling="{}")]
        run = write(tmp_path, [*calls, *others], engine.model_dir)
        status, output = check(run, engine.url, "--sample", "2", "--json")
        report = json.loads(output)
        assert (status, report["skipped"]) == (0, {"other weights": 2, "not sampled neutrally": 1})
        assert (report["comparable"], sum(row["calls"] for row in report["rows"])) == (3, 2)

    # peft 0.21 uses a name that transformers 5.23 deprecates
    @pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
    def test_the_calls_of_an_adapter_are_scored_by_it(self, engine, adapter, calls, tmp_path):
        sampled = sample(engine, "lora", calls[0].prompt_ids, model=adapter, version=ADAPTER)
        run = write(tmp_path, [calls[0], sampled], engine.model_dir)
        status, output = check(run, engine.url, "--threshold", "1e-4", "--json")
        assert (status, [row["policy_version"] for row in json.loads(output)["rows"]]) == (
            0,
            [ADAPTER, "default"],
        )

    def test_the_calls_of_an_adapter_that_is_not_loaded_are_skipped(self, engine, calls, tmp_path):
        (tmp_path / POLICY_FILE).write_text(json.dumps({"model": "policy-9", "version": "9"}))
        run = write(tmp_path, [*calls, call(version="9")], engine.model_dir)
        status, output = check(run, engine.url, "--json")
        assert (status, json.loads(output)["skipped"]) == (0, {"other weights": 1})

    def test_tokens_of_another_vocabulary_are_an_error_that_says_what_to_do(self, engine, tmp_path):
        run = write(tmp_path, [call(sampled=(5, 999_999))], engine.model_dir)
        with pytest.raises(
            EngineError, match=r"out of vocabulary.*start it with the model that run.json names"
        ):
            check(run, engine.url)


def test_an_engine_that_is_down_is_an_error_that_says_what_to_do(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(EngineError, match=r"no engine answers .*start it with `rolltap serve`"):
        check(write(tmp_path, [call()]), url)


def test_a_server_that_is_not_vllm_is_an_error(tmp_path, scripted_engine):
    with pytest.raises(EngineError, match="is it vLLM\\? start it with `rolltap serve`"):
        check(write(tmp_path, [call()]), f"{scripted_engine.url}/of-another-server")
