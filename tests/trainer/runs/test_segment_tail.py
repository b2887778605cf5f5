import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltap.addons.store.records import Call
from rolltap.addons.store.segment import SegmentReader
from rolltap.addons.store.tables import TABLES, RunWriter, run_files
from rolltap.trainer.runs.segment_tail import find_tail

SCHEMA = TABLES["calls"]


@pytest.fixture(scope="module")
def segment(tmp_path_factory):
    """A file with three commits, its bytes, and where they begin."""
    run = tmp_path_factory.mktemp("run")
    writer = RunWriter(run, "never")
    for number in range(3):
        writer.add_call(Call("s", str(number), [1] * number, [2, 3], [-0.5, -0.25], messages="x" * number))
    [path] = run_files(run, "calls")
    with SegmentReader(path) as reader:
        starts = [offset for offset, _ in reader]
    yield path, path.read_bytes(), starts
    writer.close()


def tail_of(segment, data):
    path, _, _ = segment
    path.write_bytes(data)
    return find_tail(path, SCHEMA)


def test_a_whole_file_has_no_tail(segment):
    _, whole, _ = segment
    assert tail_of(segment, whole) is None
    assert tail_of(segment, whole + b"\xff\xff\xff\xff\0\0\0\0") is None


def test_wherever_a_file_is_cut_the_rest_of_the_commit_is_known_for_what_it_is(segment):
    _, whole, starts = segment
    for size in range(len(whole)):
        tail = tail_of(segment, whole[:size])
        begun = max((start for start in starts if start < size), default=0)
        if size in starts:
            assert tail is None
        elif begun == 0:
            assert (tail.kind, tail.start, tail.size) == ("headless", 0, size)
        else:
            assert (tail.kind, tail.start, tail.size) == ("cut", begun, size - begun)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 1000])
def test_what_begins_with_zeros_was_never_committed(segment, size):
    _, whole, starts = segment
    commit = whole[starts[0] : starts[1]]
    tail = tail_of(segment, whole + bytes(8) + commit[8 : 8 + size])
    assert (tail.kind, tail.start, tail.size) == ("uncommitted", len(whole), 8 + size)


def test_commits_behind_a_damaged_one_are_counted(segment):
    _, whole, starts = segment
    for zeros in (8, starts[1] - starts[0]):
        tail = tail_of(segment, whole[: starts[0]] + bytes(zeros) + whole[starts[0] + zeros :])
        assert (tail.kind, tail.start, tail.later) == ("unknown", starts[0], 2)


def test_bytes_behind_the_end_of_the_stream_are_not_to_be_touched(segment):
    _, whole, _ = segment
    assert tail_of(segment, whole + b"\xff\xff\xff\xff\0\0\0\0" + b"more").kind == "unknown"


@given(st.integers(0, 2**16), st.integers(1, 255))
@settings(max_examples=500, deadline=None)
def test_a_changed_byte_is_never_taken_for_a_lost_end(segment, position, change):
    _, whole, _ = segment
    data = bytearray(whole)
    data[position % len(whole)] ^= change
    tail = tail_of(segment, bytes(data))
    assert tail is None or tail.kind == "unknown"
