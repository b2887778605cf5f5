import pytest

from rolltap.addons.wire.protocol import BURST, Frames

PING = b"\x89\x80mask"


def frame(length):
    if length < 126:
        size = bytes([128 | length])
    else:
        size = b"\xfe" + length.to_bytes(2) if length < 1 << 16 else b"\xff" + length.to_bytes(8)
    return b"\x82" + size + b"mask" + bytes(length)


@pytest.mark.parametrize("step", [1, 7, 100_000])
def test_frames_are_counted_wherever_a_read_ends(step):
    data = b"".join(map(frame, (0, 1, 125, 126, 65_535, 65_536, 0)))
    frames = Frames()
    assert sum(frames._count(data[i : i + step]) for i in range(0, len(data), step)) == 7


def test_a_flood_of_small_frames_is_refused():
    assert Frames().accept(PING * BURST)
    assert not Frames().accept(PING * (BURST * 2))


def test_a_long_message_in_many_frames_is_no_flood():
    frames = Frames()
    assert all(frames.accept(frame(4000)) for _ in range(4 * BURST))
