"""Two engines as one: their owner, their base weights, and new weights for all or none."""

import json
import os
import re
import signal
from pathlib import Path
from threading import Barrier, Event

import pytest

from rolltap.addons.errors import EngineError, InputError
from rolltap.trainer.engine import engines as engines_module
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.engine.engines import Engines, Weights
from rolltap.trainer.engine.in_vllm.rolltap_owner import PATH
from rolltap.trainer.engine.owners import Owner, claim
from rolltap.trainer.engine.weights import Base
from tests.trainer.engine.acting import BASE, IDS, acting, trainer

RUN, VERSION = "1a2b3c4d", "1a2b3c4d.0.2"


def folder(path, **config):
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"hidden_size": 8} | config))
    return path


def reload(engines, new, old):
    with engines.reloaded(new, old):
        pass


@pytest.fixture
def model(tmp_path):
    return folder(tmp_path / "model")


@pytest.fixture
def pair(model):
    with acting(model) as one, acting(model) as two:
        yield one, two


@pytest.fixture
def engines(pair):
    return Engines([each.url for each in pair])


@pytest.fixture
def new(tmp_path):
    return Weights(folder(tmp_path / "new"), f"{RUN}.1.2")


@pytest.fixture
def old(model):
    return Weights(model, VERSION)


@pytest.mark.parametrize(
    "urls", ["", " ", "http://a,", "http://a, http://a/", [], ["http://a", "http://a"]]
)
def test_a_list_of_engines_names_each_once(urls):
    with pytest.raises(InputError, match="give the URL of each engine once"):
        Engines(urls)


def test_engines_are_given_as_a_sequence_or_with_commas(pair, engines):
    given = Engines(f"{pair[0].url}/, {pair[1].url}")
    assert [engine.url for engine in given.admins] == [engine.url for engine in engines.admins]
    assert [models.base for models in given.each(EngineAdmin.models)] == ["tiny", "tiny"]
    given.each(EngineAdmin.require_endpoints)
    for each in pair:
        each.refuses["/v1/models"] = -1
    with pytest.raises(EngineError) as raised:
        engines.each(EngineAdmin.models)
    assert all(f"GET {each.url}/v1/models: 500" in str(raised.value) for each in pair)


class TestOwner:
    def owners(self, pair):
        return [each.register._owner for each in pair]

    def test_engines_are_owned_inside_the_block_also_after_a_kill_and_when_they_are_started_again(
        self, pair, engines
    ):
        pair[0].register._owner = RUN  # the killed training did not give it back
        with engines.claimed(RUN, "a host"):
            assert self.owners(pair) == [RUN, RUN]
            pair[0].start()
            engines.require_owned()
            assert self.owners(pair) == [RUN, RUN]
        assert self.owners(pair) == [None, None]

    def test_a_second_training_is_refused_and_takes_no_engine(self, pair, engines):
        taken = pair[1]
        with (
            Engines(taken.url).claimed("22222222", "host two"),
            pytest.raises(EngineError, match=rf"{taken.url}: 22222222 \(host two\)"),
            engines.claimed(RUN, "a host"),
        ):
            pass
        assert self.owners(pair) == [None, None]

    def test_an_engine_is_stolen_on_request_and_its_former_owner_publishes_no_more(
        self, pair, engines, new, old
    ):
        with engines.claimed(RUN, "a host"):
            engines.require_owned()
            with Engines(pair[1].url).claimed("22222222", "the thief", steal=True):
                with pytest.raises(EngineError, match=r"22222222 \(the thief\)"):
                    engines.require_owned()
                assert self.owners(pair) == [RUN, "22222222"]
                with pytest.raises(EngineError, match="22222222"):
                    reload(engines, new, old)
                assert "/pause" not in pair[1].paths
        assert self.owners(pair) == [None, None]

    def test_engines_are_given_back_when_the_training_fails(self, pair, engines):
        def train():
            with engines.claimed(RUN, "a host"):
                pair[0].refuses[PATH] = 1  # giving back fails too; the other one is given back
                raise RuntimeError("no memory")

        with pytest.raises(RuntimeError, match="no memory"):
            train()
        assert self.owners(pair) == [RUN, None]

    @pytest.mark.parametrize(
        ("path", "never"),
        [("/pause", {"/collective_rpc", "/resume"}), ("/reset_prefix_cache", {"/resume"})],
    )
    def test_a_stolen_engine_is_left_to_the_thief_from_then_on(
        self, pair, engines, new, old, path, never
    ):
        def steal(method, body):
            claim(Engines(pair[1].url).admins[0], Owner("22222222", "the thief"), steal=True)
            return pair[1].act(path, method, body)

        with engines.claimed(RUN, "a host"):
            pair[1].answers[path] = steal
            with pytest.raises(
                EngineError, match=rf"22222222 .*; all other engines serve the weights {VERSION}"
            ):
                reload(engines, new, old)
        assert (pair[0].weights, pair[0].paused) == ("model", False)
        assert not never & {*pair[1].paths}
        assert self.owners(pair) == [None, "22222222"]

    def test_calls_in_flight_are_kept_on_the_way_back_too(self, pair, new, old, monkeypatch):
        kept, pause = [], EngineAdmin.pause

        def noted(engine, *, keep=False):
            kept.append(keep)
            pause(engine, keep=keep)

        monkeypatch.setattr(EngineAdmin, "pause", noted)
        engines = Engines([each.url for each in pair], keep=True)
        with pytest.raises(EngineError, match="they differ"), engines.reloaded(new, old):
            raise EngineError("they differ")
        assert kept == [True] * 4
        assert [each.weights for each in pair] == ["model", "model"]

    def test_engines_are_given_back_at_the_same_time(self, pair, engines):
        together = Barrier(2, timeout=60)

        def answer(method, body):
            if method == "DELETE":
                together.wait()
            return pair[0].act(PATH, method, body)

        with engines.claimed(RUN, "a host"):
            for each in pair:
                each.answers[PATH] = answer
        assert not together.broken

    def test_adapters_of_ended_trainings_are_unloaded_but_not_without_a_register_of_the_owner(
        self, pair, engines, caplog
    ):
        del pair[1].answers[PATH]
        for each in pair:
            each.adapters |= {
                "policy-22222222.5.0": "",
                f"policy-{RUN}.1.0": "",
                "judge": "",
                "policy-judge": "",
            }
        with engines.claimed(RUN, "a host"):
            engines.require_owned()
            assert self.owners(pair) == [RUN, None]
            engines.unload_ended(RUN)
        assert f"{pair[1].url} has no register of its owner" in caplog.text
        assert set(pair[0].adapters) == {f"policy-{RUN}.1.0", "judge", "policy-judge"}
        assert "policy-22222222.5.0" in pair[1].adapters
        assert (
            f"{pair[0].url}: the adapter policy-22222222.5.0 was unloaded: the training that"
            in caplog.text
        )


class TestBaseWeights:
    @pytest.fixture
    def said(self):
        return []

    @pytest.fixture
    def verify(self, engines, model, said):
        def verify(own=BASE):
            found = engines.verify_base(Base(model, VERSION, IDS, trainer(own), 1e-3), said.append)
            return list(found.values())

        return verify

    @pytest.mark.parametrize("version", ["default", f"{RUN}.0.1"])
    def test_an_engine_that_serves_them_is_left_as_it_is(self, pair, verify, said, version):
        pair[0].version = version  # restored by an earlier attempt, or loaded by vLLM
        assert verify(own=[-1.0009, -2.0009, -3.0009]) == pytest.approx([9e-4, 9e-4])
        assert (said, pair[0].version) == ([], version)
        assert not {"/pause", "/resume", "/collective_rpc"} & {*pair[0].paths, *pair[1].paths}

    @pytest.mark.parametrize("version", ["99999999.4.0", "99999999.0.0", f"{RUN}.3.1", "1"])
    def test_published_weights_are_replaced_visibly(self, pair, verify, said, version):
        pair[1].version, pair[1].weights = version, "published"
        verify()
        what = f"the published weights {version}: it loads {pair[1].root} again"
        assert said == [f"the engine at {pair[1].url} serves {what}"]
        served = [(each.version, each.weights, each.paused) for each in pair]
        assert served == [("default", "model", False), (VERSION, "model", False)]

    @pytest.mark.parametrize(
        ("paused", "weights", "why"),
        [
            (True, "", "is paused, as a killed training leaves it"),
            (False, "other", "which differ from .* by 1 nats"),
        ],
    )
    def test_an_engine_that_does_not_serve_them_loads_them(
        self, pair, verify, said, paused, weights, why
    ):
        pair[0].paused, pair[0].weights = paused, weights
        pair[0].scores["other"] = [-2.0, -3.0, -4.0]
        verify()
        assert re.search(why, said[0])
        assert (pair[0].paused, pair[0].weights, pair[0].version) == (False, "model", VERSION)

    def test_an_engine_that_still_differs_is_refused_by_name_root_version_and_fix(
        self, pair, verify, model
    ):
        pair[0].scores["model"] = [-2.0, -3.0, -4.0]
        with pytest.raises(EngineError) as raised:
            verify()
        parts = (
            pair[0].url,
            f"model {model}",
            f"weights {VERSION}",
            "1 nats",
            f"rolltap serve {model}",
            "--dtype",
        )
        assert [part for part in parts if part not in str(raised.value)] == []
        with pytest.raises(EngineError, match="differs from the trainer by inf nats"):
            verify(own=[float("nan")] * 3)

    def test_an_engine_of_another_model_is_refused_before_it_loads_anything(
        self, pair, verify, tmp_path
    ):
        pair[0].root = folder(tmp_path / "larger", hidden_size=16)
        pair[0].scores["model"] = [-2.0, -3.0, -4.0]
        with pytest.raises(
            EngineError, match=r"its own model is .*larger, and there is no sign here that it is"
        ):
            verify()
        assert "/collective_rpc" not in pair[0].paths
        pair[0].register._base = str(pair[0].root)  # it was verified as another model
        pair[0].root, pair[0].version = Path("Qwen/Qwen3-4B"), "22222222.3.0"
        with pytest.raises(
            EngineError,
            match=r"its own model is Qwen/Qwen3-4B, and there is no sign here that it is",
        ):
            verify()

    @pytest.mark.parametrize("state", ["restarted", "killed", "another training"])
    def test_an_engine_that_was_verified_under_another_name_gets_the_model_again(
        self, pair, engines, verify, model, said, state
    ):
        for each in pair:
            each.root = Path("Qwen/Qwen3-4B")
        with engines.claimed(RUN, "the first start"):
            verify()
        pair[0].weights, pair[0].version = "published", f"{RUN}.3.0"
        pair[0].paused = state == "killed"
        owner = "22222222" if state == "another training" else RUN
        with engines.claimed(owner, "the next start"):
            verify()
        assert (pair[0].weights, pair[0].version, pair[0].paused) == ("model", VERSION, False)

    def test_an_engine_whose_model_has_another_name_is_told_of(
        self, pair, verify, tmp_path, model, said
    ):
        pair[0].root = folder(tmp_path / "copy", transformers_version="4.0")  # the same model
        pair[0].version = "99999999.1.0"
        verify()
        assert pair[0].version == VERSION
        said.clear()
        pair[0].root = tmp_path / "elsewhere"
        verify(own=[-1.0002, -2.0002, -3.0002])
        assert said == [
            f"the engine at {pair[0].url} serves {pair[0].root}: taken for {model}, 0.0002 nats"
            " from it"
        ]


def test_the_differences_are_those_of_each_engine(pair, engines):
    pair[1].scores["model"] = [-1.1, -2.1, -3.1]
    assert [*engines.differences(None, IDS, trainer(BASE)).values()] == pytest.approx([0, 0.1])
    for each in pair:
        each.adapters["policy-1"] = "/1"
        each.scores["policy-1"] = [-2.0, -3.0, -4.0]
    assert [*engines.differences("policy-1", IDS, trainer(BASE)).values()] == pytest.approx([1, 1])
    assert [*engines.differences(None, IDS, trainer([float("nan")])).values()] == [float("inf")] * 2
    assert {path for each in pair for path in each.paths} == {
        "/v1/models",
        "/inference/v1/generate",
    }


class TestNewWeights:
    def test_all_engines_are_paused_before_one_loads_them_and_resumed_after(
        self, pair, engines, new, old
    ):
        reload(engines, new, old)
        for each in pair:
            assert (each.weights, each.version, each.paused) == ("new", new.version, False)
            loading = [
                "/collective_rpc",
                "/reset_prefix_cache",
                "/update_weight_version",
                "/weight_info",
            ]
            assert each.paths == ["/pause", *loading, "/resume"]

    @pytest.mark.parametrize(
        "step",
        ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"],
    )
    def test_when_one_refuses_a_step_all_go_back(self, pair, engines, new, old, step):
        pair[1].refuses[step] = 1
        with pytest.raises(
            EngineError,
            match=rf"{pair[1].url}{step}\S*: 500 .*; all engines serve the weights {VERSION}",
        ):
            reload(engines, new, old)
        version = "default" if step == "/pause" else VERSION  # then none loads anything
        assert [(each.weights, each.version, each.paused) for each in pair] == [
            ("model", version, False)
        ] * 2
        assert ("/collective_rpc" in [*pair[0].paths, *pair[1].paths]) == (step != "/pause")

    def test_an_engine_that_cannot_go_back_is_named_and_stays_paused(self, pair, engines, new, old):
        pair[0].refuses["/collective_rpc"] = -1
        with pytest.raises(
            EngineError, match=rf"go back to the weights {VERSION}: .*{pair[0].url}"
        ) as raised:
            reload(engines, new, old)
        assert pair[1].url not in str(raised.value)
        assert [(each.weights, each.paused) for each in pair] == [("model", True), ("model", False)]

    def test_an_interruption_waits_for_the_engines_says_so_and_goes_back(
        self, pair, engines, new, old, caplog
    ):
        interrupt(
            pair[1], "/reset_prefix_cache", lambda: wait_until(lambda: "stopping" in caplog.text)
        )
        with pytest.raises(KeyboardInterrupt):
            reload(engines, new, old)
        assert caplog.text.count("stopping: waiting for the engines") == 1
        assert [(each.weights, each.version, each.paused) for each in pair] == [
            ("model", VERSION, False)
        ] * 2

    def test_an_interruption_does_not_wait_for_ever_and_the_next_start_restores_the_engine(
        self, pair, engines, new, old, monkeypatch, caplog
    ):
        monkeypatch.setattr(engines_module, "STOP_SECONDS", 0.01)
        going_on = Event()
        interrupt(pair[1], "/pause", going_on.wait)
        with pytest.raises(engines_module.Unanswered):
            reload(engines, new, old)
        going_on.set()
        assert f"{pair[1].url} has not answered" in caplog.text
        wait_until(lambda: pair[0].paused and pair[1].paused)
        assert not {"/collective_rpc", "/resume"} & {*pair[0].paths, *pair[1].paths}
        engines.verify_base(Base(old.folder, VERSION, IDS, trainer(BASE), 1e-3), lambda line: None)
        assert [(each.weights, each.paused) for each in pair] == [("model", False)] * 2


def wait_until(holds):
    while not holds():
        Event().wait(0.001)


def interrupt(server, path, then):
    """Let an engine interrupt the program the first time that it is asked for a path, and go on
    after `then`."""
    asked = []
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it

    def answer(method, body):
        if not asked:
            asked.append(path)
            os.kill(os.getpid(), signal.SIGINT)
            then()
        return server.act(path, method, body)

    server.answers[path] = answer


class TestAdapters:
    @pytest.fixture
    def adapters(self, tmp_path):
        return {name: folder(tmp_path / name) for name in ("policy-a", "policy-b")}

    def test_an_engine_loads_those_that_it_lacks_and_unloads_unwanted_ones(
        self, pair, engines, adapters
    ):
        pair[0].adapters["policy-a"] = "/before"
        with engines.loaded(adapters):
            pass
        assert [set(each.adapters) for each in pair] == [set(adapters)] * 2
        assert pair[0].adapters["policy-a"] == "/before"
        pair[0].adapters["other"] = ""
        engines.unload(lambda name: name.startswith("policy-"))
        assert [set(each.adapters) for each in pair] == [{"other"}, set()]

    def test_when_one_or_the_block_refuses_them_all_unload_what_they_loaded(
        self, pair, engines, adapters
    ):
        pair[0].adapters["policy-a"] = "/before"
        with pytest.raises(EngineError, match="no agreement"), engines.loaded(adapters):
            raise EngineError("no agreement")
        assert [set(each.adapters) for each in pair] == [{"policy-a"}, set()]
        pair[1].refuses["/v1/load_lora_adapter"] = -1
        with (
            pytest.raises(EngineError, match=rf"{pair[1].url}/v1/load_lora_adapter: 500"),
            engines.loaded(adapters),
        ):
            pass
        assert [set(each.adapters) for each in pair] == [{"policy-a"}, set()]
