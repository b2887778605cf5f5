import pytest

from rolltap.trainer.traces.ledger import Ledger, LedgerError


def test_ledgers_add():
    total = Ledger(5, 2, {"failed": 3}) + Ledger(4, 1, {"failed": 1, "aborted": 2}) + Ledger()
    assert total == Ledger(9, 3, {"failed": 4, "aborted": 2})
    total.check()


@pytest.mark.parametrize("ledger", [Ledger(5, 4), Ledger(5, 5, {"failed": 1}), Ledger(0, 1)])
def test_a_ledger_that_does_not_add_up_is_an_error(ledger):
    with pytest.raises(LedgerError, match=f"does not add up: {ledger.sampled}: {ledger.trained} to train"):
        ledger.check()
