import threading
from collections import Counter
from types import SimpleNamespace

import pytest

from rolltap.addons.errors import EngineError, RecorderError
from rolltap.addons.store.records import Session
from rolltap.trainer.service.metrics import Metrics
from rolltap.trainer.traces.ledger import Ledger


@pytest.mark.parametrize(
    ("version", "age"), [("second", 0), ("first", 1), ("default", 2), (None, 2)]
)
def test_a_session_is_as_old_as_policies_were_published_since_its_own(version, age):
    metrics = Metrics(
        SimpleNamespace(
            book=SimpleNamespace(policies={"first": 0, "second": 1}), recorded=SimpleNamespace()
        )
    )
    metrics.observe(
        Session(session_id="s", status="completed", policy_version=version), 0.0, Ledger()
    )
    assert metrics._age.collect()[0].samples[-2].value == age


class Groups:
    """Groups that tell in which thread they are read."""

    def __init__(self):
        self.runner = None
        self.policies = {"first": 0}
        self.threads = {}
        self.book = self.recorded = self.engines = self.worker = self.recorder = self

    def waiting(self):
        self.threads["the queue"] = threading.get_ident()
        return Counter({50: 3})

    def load(self):
        self.threads["the engines"] = threading.get_ident()
        raise EngineError("silent")

    def proxy(self, _):
        self.threads["the recorder"] = threading.get_ident()
        raise RecorderError("gone")


async def test_the_queue_is_read_where_it_changes_and_what_may_block_elsewhere():
    groups = Groups()
    text = await Metrics(groups).text()
    assert b'rolltap_queue{priority="50"} 3.0' in text
    here = threading.get_ident()
    assert {what for what, thread in groups.threads.items() if thread == here} == {"the queue"}
    assert groups.threads.keys() == {"the queue", "the engines", "the recorder"}
