"""The weights that engines serve, by version."""

import json

import pytest

from rolltap.trainer.engine.engines import Engines, served_weights
from tests.trainer.engine.acting import acting

ADAPTER = "1a2b3c4d.2.0"


@pytest.fixture
def engine(tmp_path):
    with acting(tmp_path) as engine:
        engine.adapters |= {f"policy-{ADAPTER}": "", "judge": ""}
        yield engine


@pytest.fixture
def served(engine, tmp_path):
    def served(version):
        engine.version = version
        (tmp_path / "policy.json").write_text(json.dumps({"model": "judge", "version": "mine"}))
        return served_weights(Engines(engine.url), tmp_path, [str(tmp_path)]).names

    return served


@pytest.mark.parametrize("base", ["default", "ffffffff.0.3"])
def test_adapters_are_served_on_the_base_weights_that_they_were_made_for(served, base):
    assert served(base) == {ADAPTER: f"policy-{ADAPTER}", "mine": "judge", base: None}


@pytest.mark.parametrize("base", ["ffffffff.3.0", "1a2b3c4d.1.0"])
def test_adapters_on_published_weights_are_other_policies(served, base):
    assert served(base) == {base: None}
