import h11
import pytest
from h11._receivebuffer import ReceiveBuffer
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.wire.pieces import CHUNK_BURST, Bucket, Chunks


def test_a_burst_is_free_and_what_goes_on_is_bounded_by_a_rate(monkeypatch):
    now = 100.0
    monkeypatch.setattr("rolltap.addons.wire.pieces.time.monotonic", lambda: now)
    bucket = Bucket(10, 2)
    assert [bucket.take() for _ in range(11)] == [True] * 10 + [False]
    now = 101.0
    assert [bucket.take(), bucket.take(2), bucket.take(), bucket.take()] == [True, False, True, False]
    now = 1000.0
    assert not bucket.take(11)
    assert bucket.take(10)


def read(reader, buf, data):
    """Return what a body has in `data`, and whether it is over."""
    buf += data
    found = []
    while isinstance(part := reader(buf), h11.Data):
        found.append(bytes(part.data))
    return b"".join(found), part is not None


EXTRAS = [b"", b" ", b";a=b", b"; a=\r "]


@given(
    chunks=st.lists(st.tuples(st.binary(min_size=1, max_size=40), st.sampled_from(EXTRAS))),
    trailers=st.sampled_from([b"", b"A: b\r\n", b"no colon\r\n"]),
    step=st.integers(1, 100),
)
def test_a_body_is_read_wherever_a_read_ends_and_without_its_trailers(chunks, trailers, step):
    sent = b"".join(b"%X%b\r\n%b\r\n" % (len(data), extra, data) for data, extra in chunks)
    sent += b"0\r\n" + trailers + b"\r\n"
    reader, buf = Chunks(), ReceiveBuffer()
    parts = [read(reader, buf, sent[i : i + step]) for i in range(0, len(sent), step)]
    assert b"".join(part for part, _ in parts) == b"".join(data for data, _ in chunks)
    assert [over for _, over in parts] == [False] * (len(parts) - 1) + [True]
    assert not buf


@pytest.mark.parametrize("sent", [b"x\r\n", b"\r\n", b"1\r\nxyz", b"1" * 21 + b"\r\n", b"1;\n\r\n", b" 1\r\nx\r\n"])
def test_a_malformed_chunk_is_refused(sent):
    with pytest.raises(h11.ProtocolError):
        read(Chunks(), ReceiveBuffer(), b"2\r\nab\r\n" + sent)


def test_short_events_are_no_flood_and_single_bytes_are():
    reader, buf = Chunks(), ReceiveBuffer()
    assert all(read(reader, buf, b"10\r\n0123456789abcdef\r\n" * 1000)[0] for _ in range(CHUNK_BURST // 500))
    with pytest.raises(h11.ProtocolError, match="too many chunks of less than 16 bytes"):
        read(reader, buf, b"1\r\nx\r\n" * (2 * CHUNK_BURST))
