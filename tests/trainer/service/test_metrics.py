from types import SimpleNamespace

import pytest

from rolltap.addons.store.records import Session
from rolltap.trainer.service.metrics import Metrics
from rolltap.trainer.traces.ledger import Ledger


@pytest.mark.parametrize(("version", "age"), [("second", 0), ("first", 1), ("default", 2), (None, 2)])
def test_a_session_is_as_old_as_policies_were_published_since_its_own(version, age):
    metrics = Metrics(SimpleNamespace(policies={"first": 0, "second": 1}))
    metrics.observe(Session(session_id="s", status="completed", policy_version=version), 0.0, Ledger())
    assert metrics._age.collect()[0].samples[-2].value == age
