"""`rolltap score`: log-probabilities of another model at every sampled token, stored in the run."""

import json
from threading import Barrier

import numpy as np
import pytest
from click.testing import CliRunner

from rolltap import open_run
from rolltap.addons.store.metadata import tokenizer_digests
from rolltap.addons.store.tables import run_files
from rolltap.errors import EngineError, InputError
from rolltap.trainer.cli.runs import score_command
from rolltap.trainer.engine.in_vllm.rolltap_owner import PATH
from tests.factories import add_rows, make_call, make_session, write_run
from tests.trainer.engine.acting import Acting, serving

ROOT = make_call(1, [11, 12, 13], [14, 15])
LEFT = make_call(2, [16], [17, 18], after=ROOT)
LAST = make_call(3, [19], [20], after=LEFT)
RIGHT = make_call(4, [26, 27], [28], after=ROOT)
OTHER = make_call(5, [31], [32, 33], session_id="t")
CALLS = [ROOT, LEFT, LAST, RIGHT, OTHER]


def logprob(before, token):
    """Return what the engine says of a token: it depends on all tokens before it."""
    return -(sum(before) % 89) / 64 - token / 1024


def ids_of(call):
    return [*call.prompt_ids, *call.completion_ids]


def expected(call):
    ids = ids_of(call)
    return [logprob(ids[:i], ids[i]) for i in range(len(call.prompt_ids), len(ids))]


class Scoring(Acting):
    """An engine with a tokenizer, whose scores are `logprob`."""

    def __init__(self, root, tokenizer):
        super().__init__(root)
        self.tokenizer = tokenizer
        self.answers["/tokenize"] = self.tokenize
        self.answers["/detokenize"] = self.detokenize
        self.scored = []
        """The prompts that were scored."""
        self.meet = Barrier(1)
        """Requests wait here for each other."""
        self.after = lambda: None
        """Called before a score is returned."""

    def tokenize(self, method, body):
        return {"tokens": self.tokenizer.encode(body["prompt"], add_special_tokens=False)}

    def detokenize(self, method, body):
        return {"prompt": self.tokenizer.decode(body["tokens"])}

    def act(self, path, method, body):
        if path != "/v1/completions":
            return super().act(path, method, body)
        ids = body["prompt"]
        entries = [None]
        for i in range(1, len(ids)):
            entry = {str(ids[i]): {"logprob": logprob(ids[:i], ids[i])}}
            for rank in range(body["prompt_logprobs"]):
                entry[str(9000 + rank)] = {"logprob": (rank + 1) / -4096}
            entries.append(entry)
        self.meet.wait()
        self.scored.append(ids)
        self.after()
        return {"choices": [{"prompt_logprobs": entries}]}


@pytest.fixture
def engine(tmp_path, tokenizer):
    with serving(Scoring(tmp_path / "big", tokenizer)) as engine:
        yield engine


@pytest.fixture
def written(tmp_path, tokenizer, tokenizer_folder):
    """Return a function that writes a run of the tokenizer."""
    digests = tokenizer_digests(tokenizer.get_vocab(), tokenizer.chat_template)
    recorded = {"model": str(tokenizer_folder), **digests}

    def written(*rows, name="run", **metadata):
        return write_run(tmp_path / name, *rows, **{**recorded, **metadata})

    return written


@pytest.fixture
def run(written):
    return written(*CALLS, make_session(), make_session("t"))


def score(run, engine, *options, name="big"):
    """Run `rolltap score`, and return its exit status and what it printed. Raises the errors of
    users."""
    arguments = [str(run), "--engine", engine.url, "--as", name, *options]
    ended = CliRunner().invoke(score_command, arguments, standalone_mode=False)
    if ended.exception and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    return ended.exit_code, ended.stdout


def test_every_sampled_token_has_the_score_of_its_place_and_a_conversation_takes_one_request(
    run, engine
):
    status, printed = score(run, engine, "--json")
    assert status == 0
    apart = []
    for call in CALLS:
        found = open_run(run).scores("big", call.session_id)[call.call_id]
        assert found.logprobs == expected(call)
        assert found.scorer == f"{engine.root} (weights default)"
        assert found.top_k == 0
        assert found.top_ids == []
        apart += np.subtract(call.logprobs, expected(call)).tolist()
    assert sorted(engine.scored) == sorted([ids_of(LAST), ids_of(RIGHT), ids_of(OTHER)])
    report = json.loads(printed)
    assert report.pop("divergence") == pytest.approx(np.mean(apart))
    assert report == {
        "name": "big",
        "scorer": f"{engine.root} (weights default)",
        "known": 0,
        "calls": 5,
        "tokens": len(apart),
        "skipped": {},
    }
    assert open_run(run).verify(progress=False).verdict == "ok"


def test_the_likeliest_tokens_are_stored_in_order_and_fewer_are_scored_again(run, engine):
    score(run, engine)
    score(run, engine, "--top-k", "2")
    found = open_run(run).scores("big", "s")["2"]
    assert found.logprobs == expected(LEFT)
    assert found.top_ids == [9000, 9001] * 2
    assert found.top_logprobs == [-1 / 4096, -2 / 4096] * 2
    requests = len(engine.scored)
    score(run, engine, "--top-k", "1")
    assert len(engine.scored) == requests


def test_a_scoring_that_failed_goes_on_with_the_calls_that_have_no_scores(run, engine):
    engine.after = lambda: engine.refuses.update({"/v1/completions": -1})
    with pytest.raises(EngineError, match="refused"):
        score(run, engine, "--concurrency", "1")
    assert len(engine.scored) == 1
    engine.refuses = {}
    engine.after = lambda: None
    _, printed = score(run, engine)
    assert len(engine.scored) == 3
    assert "had scores before: 3\n" in printed
    assert len(open_run(run).scores("big", "s")) == 4


def test_so_many_requests_run_at_a_time(run, engine):
    engine.meet = Barrier(3, timeout=120)
    assert score(run, engine, "--concurrency", "3")[0] == 0
    assert len(engine.scored) == 3


def test_a_later_call_is_scored_alone(run, engine):
    score(run, engine)
    later = make_call(6, [21], [22], after=LAST)
    add_rows(run, later)
    engine.scored.clear()
    score(run, engine)
    assert engine.scored == [ids_of(later)]
    assert open_run(run).scores("big", "s")["6"].logprobs == expected(later)


def test_calls_that_cannot_be_scored_are_counted_and_the_rest_is_scored(written, engine):
    long = make_call(7, range(100, 197), [5, 6], session_id="long")
    broken = make_call(8, session_id="broken", violation="its prompt is lost")
    failed = make_call(9, [1], [], session_id="none", status="failed")
    status, printed = score(written(*CALLS, long, broken, failed), engine)
    assert status == 3
    assert printed.startswith("big: 5 calls, 8 tokens scored by ")
    assert printed.splitlines()[-2:] == [
        "without scores: 1 too long for the engine",
        "without scores: 1 violation",
    ]


def test_an_adapter_of_the_engine_scores_as_itself(run, engine):
    with pytest.raises(InputError, match=r"serves no adapter 'policy-1': it has \[\]"):
        score(run, engine, "--adapter", "policy-1")
    engine.adapters["policy-1"] = "/1"
    score(run, engine, "--adapter", "policy-1", name="one")
    [found] = open_run(run).scores("one", "t").values()
    assert found.scorer == f"{engine.root} (weights policy-1)"
    asked = {body["model"] for path, body in engine.requests if path == "/v1/completions"}
    assert asked == {"policy-1"}


def test_some_sessions_are_scored(run, engine):
    open_run(run).score(engine.url, "big", sessions=["t"], progress=False)
    assert engine.scored == [ids_of(OTHER)]
    with pytest.raises(InputError, match="unknown"):
        open_run(run).score(engine.url, "big", sessions=["unknown"], progress=False)


def test_several_engines_share_the_work_if_they_serve_the_same(run, engine, tokenizer):
    with serving(Scoring(engine.root, tokenizer)) as second:
        both = f"{engine.url},{second.url}"
        open_run(run).score(both, "big", progress=False)
        assert sorted(map(len, (engine.scored, second.scored))) == [1, 2]
        second.version = "2"
        why = r"weights 2\) and .*weights default\): give those of one scorer"
        with pytest.raises(InputError, match=why):
            open_run(run).score(both, "other", progress=False)


def test_weights_that_change_meanwhile_end_the_scoring_and_none_of_theirs_is_stored(run, engine):
    def publish():
        engine.version = "other"

    engine.after = publish
    with pytest.raises(EngineError, match=r"now serves .*weights other\), not .*weights default\)"):
        score(run, engine)
    assert not run_files(run, "scores")


class TestRefused:
    def test_a_name_of_another_scorer(self, run, engine):
        score(run, engine)
        engine.version = "2"
        why = r"'big' .* are those of .*weights default\): score it as another name"
        with pytest.raises(InputError, match=why):
            score(run, engine)

    @pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
    def test_an_engine_with_another_tokenizer_or_two_words_swapped(
        self, run, engine, tokenizer, path
    ):
        a, b = tokenizer.convert_tokens_to_ids(["a", "b"])

        def swap(method, body):
            ids = [{a: b, b: a}.get(token, token) for token in body["tokens"]]
            return {"prompt": tokenizer.decode(ids)}

        others = {"/tokenize": {"tokens": [1, 2, 3]}, "/detokenize": swap}
        engine.answers[path] = others[path]
        with pytest.raises(InputError, match=r"big, whose tokenizer is not that of .*: it would"):
            score(run, engine)
        assert engine.scored == []

    def test_an_engine_that_ends_by_scores_beside_other_calls(self, run, engine):
        engine.answers["/server_info"] = {"vllm_config": {"lora_config": {"max_loras": 2}}}
        del engine.answers[PATH]  # `rolltap serve` did not start it
        with pytest.raises(EngineError, match=r"takes LoRA adapters, .* with `rolltap serve`, or"):
            score(run, engine)
        assert engine.scored == []

    @pytest.mark.parametrize(
        ("rows", "metadata", "message"),
        [
            (CALLS, {"tokenizer_sha256": "0"}, "was not recorded with the tokenizer that its mod"),
            (CALLS, {"model": "/nowhere/at-all"}, "no tokenizer can be loaded"),
            ([], {}, "has no calls to score"),
        ],
    )
    def test_a_run_whose_tokenizer_is_not_there_and_one_without_calls(
        self, written, engine, rows, metadata, message
    ):
        with pytest.raises(InputError, match=message):
            score(written(*rows, **metadata), engine)

    @pytest.mark.parametrize("wrong", [{"top_k": -1}, {"concurrency": 0}], ids=str)
    def test_numbers_that_make_no_sense(self, run, engine, wrong):
        with pytest.raises(InputError, match="give a name, and at least 0 and 1"):
            open_run(run).score(engine.url, "big", progress=False, **wrong)
