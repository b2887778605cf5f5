import pytest

from rolltap.addons.errors import LedgerError
from rolltap.trainer.traces.ledger import Ledger


def test_ledgers_can_be_added():
    total = (
        Ledger(sampled=5, trained=2, left_out={"failed": 3})
        + Ledger(sampled=4, trained=1, left_out={"failed": 1, "aborted": 2})
        + Ledger()
    )
    assert total == Ledger(sampled=9, trained=3, left_out={"failed": 4, "aborted": 2})
    total.check()


@pytest.mark.parametrize(
    "ledger",
    [Ledger(sampled=5, trained=4), Ledger(sampled=5, trained=5, left_out={"failed": 1}), Ledger(sampled=0, trained=1)],
)
def test_a_ledger_that_does_not_add_up_is_an_error(ledger):
    with pytest.raises(LedgerError, match=f"does not add up: {ledger.sampled}: {ledger.trained} to train"):
        ledger.check()
