"""Sessions that were begun and have no row."""

from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.records import Event, Session
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.rollouts.resume import interrupted_sessions, started_event


def test_a_session_that_was_begun_and_has_no_row_is_cancelled_with_all_that_was_known(tmp_path):
    write_metadata(tmp_path, {"model": "m"})
    known = {
        "task_id": "t",
        "group_id": "g",
        "harness": "codex",
        "harness_version": "1.2",
        "program_digest": "p",
        "preset_digest": "d",
        "task_digest": "x",
        "runtime": "sandbox",
        "image_digest": "i",
        "policy_version": "3",
    }
    first, second, ended = (
        Session(session_id=name, status="completed", reward=1.0, **known) for name in ("first", "second", "ended")
    )
    with RunWriter(tmp_path) as writer:
        for session in (second, ended, first):
            writer.add_event(started_event(session))
        writer.add_event(Event(kind="ended", session_id="third"))
        writer.add_session(ended)
    found = interrupted_sessions(tmp_path)
    assert [session.session_id for session in found] == ["first", "second"]
    for session, begun in zip(found, (first, second), strict=True):
        assert (session.status, session.reward, session.started_at) == ("cancelled", None, begun.started_at)
        assert {name: getattr(session, name) for name in known} == known


def test_the_event_of_a_later_version_is_read_as_far_as_it_is_known(tmp_path):
    write_metadata(tmp_path, {"model": "m"})
    with RunWriter(tmp_path) as writer:
        detail = '{"task_id": "t", "status": "completed"}'
        writer.add_event(Event(kind="session_started", session_id="s", detail=detail))
    (found,) = interrupted_sessions(tmp_path)
    assert (found.task_id, found.status) == ("t", "cancelled")
