"""The status of an engine in one line, the versions that engines serve, and an engine's way back to
its base weights."""

import json

import pytest

from rolltap.addons.engine.policy import UNPUBLISHED, Policy
from rolltap.addons.errors import EngineError
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.engine.engines import Engines
from rolltap.trainer.engine.status import engine_status, reset_engine, served_weights
from tests.trainer.engine.answering import HEALTHY

PUBLISHED = "1a2b3c4d.3.0"
STEP = f"the weights {PUBLISHED} (step 3 of the training 1a2b3c4d)"
ABOUT = "the training /runs/grpo on here"


@pytest.fixture
def engine(pair):
    return pair[0]


@pytest.fixture
def admin(engine):
    return EngineAdmin(engine.url)


def trained(engine, admin, *, ended=True):
    """Leave an engine as a training leaves it."""
    admin.register("PUT", owner="1a2b3c4d", about=ABOUT)
    engine.version, engine.weights, engine.paused = PUBLISHED, "published", not ended
    engine.adapters |= {f"policy-{PUBLISHED}": "/1", "judge": "/2"}
    if ended:
        admin.register("DELETE", owner="1a2b3c4d")


def test_one_line_says_the_model_the_weights_the_adapters_the_owner_and_the_state(engine, admin):
    serves = f"the engine at {engine.url} serves {engine.root}: "
    assert str(engine_status(admin)) == serves + "its base weights"
    engine.version = "1a2b3c4d.0.0"
    assert str(engine_status(admin)) == serves + "its base weights"
    trained(engine, admin)
    adapters = f"adapters: judge, policy-{PUBLISHED}"
    assert str(engine_status(admin)) == f"{serves}{STEP}; {adapters}; last owned by {ABOUT}"
    trained(engine, admin, ended=False)
    engine.answers["/health"] = (503, "")
    state = "it is paused: calls wait; it is not healthy"
    assert str(engine_status(admin)) == f"{serves}{STEP}; {adapters}; owned by {ABOUT}; {state}"
    assert engine_status(admin).version == PUBLISHED
    assert engine_status(admin).owner == "1a2b3c4d"


def test_a_vllm_without_development_routes_says_less(engine, admin):
    engine.answers = HEALTHY | {"/v1/models": engine.answers["/v1/models"]}
    assert str(engine_status(admin)).endswith(": weights that it does not name")
    with pytest.raises(
        EngineError, match="start it with `rolltap serve`, or with VLLM_SERVER_DEV_MODE=1"
    ):
        reset_engine(admin)


@pytest.mark.parametrize(
    ("version", "policy", "words"),
    [
        ("default", UNPUBLISHED, None),
        ("1a2b3c4d.0.0", UNPUBLISHED, None),
        (PUBLISHED, Policy(PUBLISHED), None),
        (PUBLISHED, UNPUBLISHED, f"by {STEP}, not by the base weights: `rolltap engine reset http"),
        ("default", Policy(PUBLISHED), f"by its base weights, not by the run's policy {PUBLISHED}"),
        ("default", Policy("1", "there"), None),
        ("default", Policy("1", "policy-1"), "the adapter policy-1, which is the run's policy"),
    ],
)
def test_another_policy_than_the_runs_is_told(engine, admin, version, policy, words):
    engine.version = version
    engine.adapters["there"] = "/1"
    found = engine_status(admin).mismatch(policy)
    assert (found is None) == (words is None)
    assert words is None or words in found


def test_while_a_training_owns_the_engine_its_end_is_named_and_no_reset_that_would_be_refused(
    engine, admin
):
    trained(engine, admin, ended=False)
    assert f"wait for the end of {ABOUT}, which owns the engine" in engine_status(admin).mismatch(
        UNPUBLISHED
    )


class TestReset:
    def test_it_has_its_base_weights_and_no_adapter_of_a_training(self, engine, admin):
        trained(engine, admin)
        reset_engine(admin)
        assert engine.served == (engine.root.name, "default", False)
        assert [*engine.adapters] == ["judge"]
        assert engine_status(admin).owner is None

    def test_base_weights_are_not_loaded_again(self, engine, admin):
        reset_engine(admin)
        assert not {"/pause", "/collective_rpc"} & {*engine.paths}

    def test_a_training_that_owns_it_is_named_and_only_asked_for_it_is_taken_from_it(
        self, engine, admin
    ):
        trained(engine, admin, ended=False)
        owned = "another training owns the engine at .*runs/grpo on here.*--steal"
        with pytest.raises(EngineError, match=owned):
            reset_engine(admin)
        assert engine.served == ("published", PUBLISHED, True)
        reset_engine(admin, steal=True)
        assert engine.served == (engine.root.name, "default", False)


ADAPTER = "1a2b3c4d.2.0"


@pytest.fixture
def served(engine, tmp_path):
    engine.adapters |= {f"policy-{ADAPTER}": "", "judge": ""}

    def served(version):
        engine.version = version
        (tmp_path / "policy.json").write_text(json.dumps({"model": "judge", "version": "mine"}))
        return served_weights(Engines(engine.url), tmp_path, [str(engine.root)]).names

    return served


@pytest.mark.parametrize("base", ["default", "ffffffff.0.3", "ffffffff.3.0", "1a2b3c4d.1.0"])
def test_adapters_are_served_on_the_base_weights_that_they_were_made_for(served, base):
    """On published weights they are other policies."""
    names = {base: None}
    if base in ("default", "ffffffff.0.3"):
        names |= {ADAPTER: f"policy-{ADAPTER}", "mine": "judge"}
    assert served(base) == names
