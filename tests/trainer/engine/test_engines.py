"""Two engines as one: their owner, their base weights, and new weights for all or none."""

import os
import re
import signal
from functools import partial
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
from tests.trainer.engine.acting import BASE, IDS, trainer

RUN = "1a2b3c4d"
VERSION = f"{RUN}.0.2"
OTHER = "22222222"
SERVES_BASE = ("model", VERSION, False)


@pytest.fixture
def old(root):
    return Weights(root, VERSION)


@pytest.fixture
def new(folder):
    return Weights(folder("new"), f"{RUN}.1.2")


@pytest.fixture
def reload(engines, new, old):
    def reload():
        with engines.reloaded(new, old):
            pass

    return reload


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
    for each in pair:
        assert f"GET {each.url}/v1/models: 500" in str(raised.value)


class TestOwner:
    @pytest.fixture
    def owners(self, pair):
        return lambda: [each.owner for each in pair]

    def test_engines_are_owned_inside_the_block_also_after_a_kill_and_when_they_are_started_again(
        self, pair, engines, owners
    ):
        claim(engines.admins[0], Owner(RUN, "killed, and did not give it back"))
        with engines.claimed(RUN, "a host"):
            assert owners() == [RUN, RUN]
            pair[0].start()
            engines.require_owned()
            assert owners() == [RUN, RUN]
        assert owners() == [None, None]

    def test_a_second_training_is_refused_and_takes_no_engine(self, pair, engines, owners):
        taken = pair[1]
        with (
            Engines(taken.url).claimed(OTHER, "host two"),
            pytest.raises(EngineError, match=rf"{taken.url}: {OTHER} \(host two\)"),
            engines.claimed(RUN, "a host"),
        ):
            pass
        assert owners() == [None, None]

    def test_an_engine_is_stolen_on_request_and_its_former_owner_publishes_no_more(
        self, pair, engines, owners, reload
    ):
        with engines.claimed(RUN, "a host"):
            engines.require_owned()
            with Engines(pair[1].url).claimed(OTHER, "the thief", steal=True):
                with pytest.raises(EngineError, match=rf"{OTHER} \(the thief\)"):
                    engines.require_owned()
                assert owners() == [RUN, OTHER]
                with pytest.raises(EngineError, match=OTHER):
                    reload()
                assert "/pause" not in pair[1].paths
        assert owners() == [None, None]

    def test_engines_are_given_back_when_the_training_fails(self, pair, engines, owners):
        def train():
            with engines.claimed(RUN, "a host"):
                pair[0].refuses[PATH] = 1  # giving back fails too; the other one is given back
                raise RuntimeError("no memory")

        with pytest.raises(RuntimeError, match="no memory"):
            train()
        assert owners() == [RUN, None]

    @pytest.mark.parametrize(
        ("path", "never"),
        [("/pause", {"/collective_rpc", "/resume"}), ("/reset_prefix_cache", {"/resume"})],
    )
    def test_a_stolen_engine_is_left_to_the_thief_from_then_on(
        self, pair, engines, owners, reload, path, never
    ):
        first, second = pair

        def steal(method, body):
            claim(engines.admins[1], Owner(OTHER, "the thief"), steal=True)
            return second.act(path, method, body)

        with engines.claimed(RUN, "a host"):
            second.answers[path] = steal
            message = rf"{OTHER} .*; all other engines serve the weights {VERSION}"
            with pytest.raises(EngineError, match=message):
                reload()
        assert first.weights == "model"
        assert not first.paused
        assert never.isdisjoint(second.paths)
        assert owners() == [None, OTHER]

    def test_engines_are_given_back_at_the_same_time(self, pair, engines):
        together = Barrier(2, timeout=120)

        def answer(method, body):
            if method == "DELETE":
                together.wait()
            return pair[0].act(PATH, method, body)

        with engines.claimed(RUN, "a host"):
            for each in pair:
                each.answers[PATH] = answer
        assert not together.broken

    def test_adapters_of_ended_trainings_are_unloaded_but_not_without_a_register_of_the_owner(
        self, pair, engines, owners, caplog
    ):
        first, second = pair
        del second.answers[PATH]
        kept = [f"policy-{RUN}.1.0", "judge", "policy-judge"]
        ended = f"policy-{OTHER}.5.0"
        for each in pair:
            each.adapters = dict.fromkeys([ended, *kept], "")
        with engines.claimed(RUN, "a host"):
            engines.require_owned()
            assert owners() == [RUN, None]
            engines.unload_ended(RUN)
        assert list(first.adapters) == kept
        assert ended in second.adapters
        assert f"{second.url} has no register of its owner" in caplog.text
        assert f"{first.url}: the adapter {ended} was unloaded: the training that" in caplog.text


class TestBaseWeights:
    @pytest.fixture
    def said(self):
        return []

    @pytest.fixture
    def verify(self, engines, root, said):
        def verify(own=BASE):
            base = Base(root, VERSION, IDS, trainer(own), 1e-3)
            return list(engines.verify_base(base, said.append).values())

        return verify

    @pytest.mark.parametrize("version", ["default", f"{RUN}.0.1"])
    def test_an_engine_that_serves_them_is_left_as_it_is(self, pair, verify, said, version):
        pair[0].version = version  # restored by an earlier attempt, or loaded by vLLM
        assert verify(own=[-1.0009, -2.0009, -3.0009]) == pytest.approx([9e-4, 9e-4])
        assert said == []
        assert pair[0].version == version
        for each in pair:
            assert {"/pause", "/resume", "/collective_rpc"}.isdisjoint(each.paths)

    @pytest.mark.parametrize("version", [f"{OTHER}.4.0", f"{OTHER}.0.0", f"{RUN}.3.1", "1"])
    def test_published_weights_are_replaced_visibly(self, pair, verify, said, version):
        first, second = pair
        second.version = version
        second.weights = "published"
        verify()
        what = f"the published weights {version}: it loads {second.root} again"
        assert said == [f"the engine at {second.url} serves {what}"]
        assert first.served == ("model", "default", False)
        assert second.served == SERVES_BASE

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
        pair[0].paused = paused
        pair[0].weights = weights
        pair[0].scores["other"] = [-2.0, -3.0, -4.0]
        verify()
        assert re.search(why, said[0])
        assert pair[0].served == SERVES_BASE

    def test_an_engine_that_still_differs_is_refused_by_name_root_version_and_fix(
        self, pair, verify, root
    ):
        pair[0].scores["model"] = [-2.0, -3.0, -4.0]
        with pytest.raises(EngineError) as raised:
            verify()
        for part in (pair[0].url, f"model {root}", f"weights {VERSION}", "1 nats"):
            assert part in str(raised.value)
        assert f"rolltap serve {root}" in str(raised.value)
        with pytest.raises(EngineError, match="differs from the trainer by inf nats"):
            verify(own=[float("nan")] * 3)

    def test_an_engine_of_another_model_is_refused_before_it_loads_anything(
        self, pair, engines, verify, folder
    ):
        engine = pair[0]
        engine.root = folder("larger", hidden_size=16)
        engine.scores["model"] = [-2.0, -3.0, -4.0]
        message = "its own model is {}, and there is no sign here that it is"
        with pytest.raises(EngineError, match=message.format(".*larger")):
            verify()
        assert "/collective_rpc" not in engine.paths
        # it was verified as another model
        for method in ("PUT", "DELETE"):
            engines.admins[0].register(method, owner=OTHER, base=str(engine.root))
        engine.root = Path("Qwen/Qwen3-4B")
        engine.version = f"{OTHER}.3.0"
        with pytest.raises(EngineError, match=message.format("Qwen/Qwen3-4B")):
            verify()

    @pytest.mark.parametrize(
        ("owner", "paused"),
        [(RUN, False), (RUN, True), (OTHER, False)],
        ids=["restarted", "killed", "another training"],
    )
    def test_an_engine_that_was_verified_under_another_name_gets_the_model_again(
        self, pair, engines, verify, owner, paused
    ):
        for each in pair:
            each.root = Path("Qwen/Qwen3-4B")
        with engines.claimed(RUN, "the first start"):
            verify()
        pair[0].weights = "published"
        pair[0].version = f"{RUN}.3.0"
        pair[0].paused = paused
        with engines.claimed(owner, "the next start"):
            verify()
        assert pair[0].served == SERVES_BASE

    def test_an_engine_whose_model_has_another_name_is_told_of(
        self, pair, verify, folder, root, said
    ):
        engine = pair[0]
        engine.root = folder("copy", transformers_version="4.0")  # the same model
        engine.version = f"{OTHER}.1.0"
        verify()
        assert engine.version == VERSION
        said.clear()
        engine.root = root / "elsewhere"
        verify(own=[-1.0002, -2.0002, -3.0002])
        what = f"{engine.root}: taken for {root}, 0.0002 nats from it"
        assert said == [f"the engine at {engine.url} serves {what}"]


def test_the_differences_are_those_of_each_engine(pair, engines):
    def differences(adapter, logprobs):
        return list(engines.differences(adapter, IDS, trainer(logprobs)).values())

    pair[1].scores["model"] = [-1.1, -2.1, -3.1]
    assert differences(None, BASE) == pytest.approx([0, 0.1])
    for each in pair:
        each.adapters["policy-1"] = "/1"
        each.scores["policy-1"] = [-2.0, -3.0, -4.0]
    assert differences("policy-1", BASE) == pytest.approx([1, 1])
    assert differences(None, [float("nan")]) == [float("inf")] * 2
    for each in pair:
        assert set(each.paths) == {"/v1/models", "/inference/v1/generate"}


class TestNewWeights:
    """A step that one of them refuses, and all go back: `test_publish`."""

    def test_all_engines_are_paused_before_one_loads_them_and_resumed_after(
        self, pair, reload, new
    ):
        reload()
        for each in pair:
            assert each.served == ("new", new.version, False)
            assert each.paths == [
                "/pause",
                "/collective_rpc",
                "/reset_prefix_cache",
                "/update_weight_version",
                "/weight_info",
                "/resume",
            ]

    def test_when_one_cannot_be_paused_none_loads_anything(self, pair, reload):
        pair[1].refuses["/pause"] = 1
        with pytest.raises(EngineError, match=f"all engines serve the weights {VERSION}"):
            reload()
        for each in pair:
            assert each.served == ("model", "default", False)
            assert "/collective_rpc" not in each.paths

    def test_calls_in_flight_are_kept_on_the_way_back_too(self, pair, new, old):
        engines = Engines([each.url for each in pair], keep=True)
        with pytest.raises(EngineError, match="they differ"), engines.reloaded(new, old):
            raise EngineError("they differ")
        for each in pair:
            pauses = [path for path, _ in each.requests if path.startswith("/pause")]
            assert pauses == ["/pause?mode=keep"] * 2
            assert each.weights == "model"

    def test_an_engine_that_cannot_go_back_is_named_and_stays_paused(self, pair, reload):
        first, second = pair
        first.refuses["/collective_rpc"] = -1
        message = rf"go back to the weights {VERSION}: .*{first.url}"
        with pytest.raises(EngineError, match=message) as raised:
            reload()
        assert second.url not in str(raised.value)
        assert first.paused
        assert second.served == SERVES_BASE

    def test_an_interruption_waits_for_the_engines_says_so_and_goes_back(
        self, pair, reload, caplog
    ):
        is_said = partial(wait_until, lambda: "stopping" in caplog.text)
        interrupt(pair[1], "/reset_prefix_cache", is_said)
        with pytest.raises(KeyboardInterrupt):
            reload()
        assert caplog.text.count("stopping: waiting for the engines") == 1
        assert [each.served for each in pair] == [SERVES_BASE] * 2

    def test_an_interruption_does_not_wait_for_ever_and_the_next_start_restores_the_engine(
        self, pair, engines, reload, old, monkeypatch, caplog
    ):
        monkeypatch.setattr(engines_module, "STOP_SECONDS", 0.01)
        going_on = Event()
        interrupt(pair[1], "/pause", going_on.wait)
        with pytest.raises(engines_module.Unanswered):
            reload()
        going_on.set()
        assert f"{pair[1].url} has not answered" in caplog.text
        wait_until(lambda: pair[0].paused and pair[1].paused)
        for each in pair:
            assert {"/collective_rpc", "/resume"}.isdisjoint(each.paths)
        engines.verify_base(Base(old.folder, VERSION, IDS, trainer(BASE), 1e-3), print)
        assert [each.served for each in pair] == [SERVES_BASE] * 2


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


def test_adapters_that_were_loaded_before_stay_when_new_ones_are_taken_back(pair, engines, folder):
    """Of new ones: `test_publish`."""
    adapters = {name: folder(name) for name in ("policy-a", "policy-b")}
    pair[0].adapters["policy-a"] = "/before"
    with pytest.raises(EngineError, match="no agreement"), engines.loaded(adapters):
        raise EngineError("no agreement")
    assert [each.adapters for each in pair] == [{"policy-a": "/before"}, {}]
    with engines.loaded(adapters):
        pair[0].adapters["other"] = ""
    assert [set(each.adapters) for each in pair] == [{*adapters, "other"}, set(adapters)]
    engines.unload(lambda name: name.startswith("policy-"))
    assert [set(each.adapters) for each in pair] == [{"other"}, set()]
