import pyarrow as pa
import pytest

from rolltap.addons.endpoint import refusals
from rolltap.addons.endpoint.refusals import Refusals
from rolltap.addons.store.records import EVENT_SCHEMA, Event


@pytest.fixture
def written():
    return []


@pytest.fixture
def counted(written):
    return Refusals(written.append)


def refuse(counted, number, session_id="s1", kind="refused", detail=""):
    for i in range(number):
        counted.record(Event(kind=kind, session_id=session_id, path=f"/{i}", detail=detail))


def test_the_first_are_listed_and_later_ones_counted_at_powers_of_two_and_at_the_end(
    counted, written
):
    refuse(counted, 300, detail="x")
    assert [event.path for event in written[:64]] == [f"/{i}" for i in range(64)]
    assert [(event.path, event.detail) for event in written[64:]] == [
        ("/127", "128 refused so far, the last: x"),
        ("/255", "256 refused so far, the last: x"),
    ]
    counted.end("s1")
    refuse(counted, 128, "s2")
    counted.end("s2")  # it tells nothing that was told
    counted.close()
    assert len(written) == 67 + 65
    assert (written[66].path, written[66].detail) == ("/299", "300 refused in all, the last: x")


def test_sessions_and_kinds_are_counted_apart(counted, written):
    refuse(counted, 100)
    refuse(counted, 100, "s2")
    refuse(counted, 100, kind="rejected")
    assert len(written) == 3 * 64
    counted.end("s2")
    assert [(event.session_id, event.detail[:3]) for event in written[3 * 64 :]] == [("s2", "100")]
    counted.close()
    assert [(event.session_id, event.kind) for event in written[-2:]] == [
        ("s1", "refused"),
        ("s1", "rejected"),
    ]


def test_what_is_counted_is_bounded_and_nothing_is_lost(counted, written, monkeypatch):
    monkeypatch.setattr(refusals, "REMEMBERED", 10)
    for i in range(30):
        refuse(counted, 70, f"s{i}")
    assert len(counted._tallies) == 10
    counted.close()
    assert len([event for event in written if event.detail.startswith("70 refused in all")]) == 30


def test_the_texts_of_an_event_are_printable_and_cut(counted, written, caplog):
    caplog.set_level("INFO")
    odd = "\x1b\udcff\n" + "x" * 10_000
    counted.record(
        Event(kind="refused", session_id=odd, host=odd, method=odd, path=odd, detail=odd)
    )
    (event,) = written
    for text in (event.session_id, event.host, event.method, event.path, event.detail):
        assert text.startswith("\\x1b\\udcff\\nxxx")
        assert len(text) < 600
    assert caplog.messages[0].isprintable()
    pa.RecordBatch.from_pylist([event.to_row()], schema=EVENT_SCHEMA)


@pytest.fixture
def one_event(monkeypatch):
    monkeypatch.setattr(refusals, "PER_SECOND", 0.0)
    monkeypatch.setattr(refusals, "BURST", 1)


def test_the_last_fault_of_a_session_is_told_at_its_end_whatever_others_do(
    one_event, counted, written
):
    refuse(counted, 10, "loud")
    for kind in ("fault", "rejected"):
        refuse(counted, 3, "quiet", kind)
    before = len(written)
    counted.end("quiet")
    assert [(event.session_id, event.kind, event.path) for event in written[before:]] == [
        ("quiet", "fault", "/2")
    ]


def test_the_last_fault_of_a_session_is_told_when_others_take_its_place(
    one_event, counted, written, monkeypatch
):
    monkeypatch.setattr(refusals, "REMEMBERED", 1)
    refuse(counted, 1, "loud")
    refuse(counted, 3, "quiet", "fault")
    refuse(counted, 1, "loud")
    assert [event.path for event in written if event.session_id == "quiet"] == ["/2"]
    refuse(counted, 3, "quiet", "fault")
    counted.close()
    assert [event.path for event in written if event.session_id == "quiet"] == ["/2", "/2"]


def test_new_names_do_not_bring_new_events_without_end(one_event, written, monkeypatch):
    monkeypatch.setattr(refusals, "BURST", 100)
    counted = Refusals(written.append)
    for i in range(500):
        refuse(counted, 1, f"s{i}")
    assert [event.session_id for event in written[:100]] == [f"s{i}" for i in range(100)]
    counts = [event.detail.split()[0] for event in written[100:]]
    assert " ".join(counts) == "1 2 4 8 16 32 64 128 256"
    counted.close()
    assert written[-1].detail == "400 events of refusals in all were left out"
