from rolltap.addons.wire.protocol import Bucket


def test_a_burst_is_free_and_what_goes_on_is_bounded_by_a_rate(monkeypatch):
    now = 100.0
    monkeypatch.setattr("rolltap.addons.wire.protocol.time.monotonic", lambda: now)
    bucket = Bucket(10, 2)
    assert [bucket.take() for _ in range(11)] == [True] * 10 + [False]
    now = 101.0
    assert [bucket.take(), bucket.take(2), bucket.take(), bucket.take()] == [True, False, True, False]
    now = 1000.0
    assert not bucket.take(11)
    assert bucket.take(10)
