from datetime import UTC, datetime, timedelta

import pytest

from rolltap.addons.store.rows import first_version


def at(seconds):
    return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)


def call(start, first, *spans):
    """Return a call that started and sampled its first token at times in seconds; a span is a version and a length."""
    position, rows = 0, []
    for version, length in spans:
        rows.append({"version": version, "start": position, "end": position + length})
        position += length
    return at(first) if first is not None else None, at(start), rows


@pytest.mark.parametrize(
    ("calls", "version"),
    [
        ([], None),
        ([call(0, None)], None),
        ([call(0, 1, ("a", 2), ("b", 1))], "a"),
        ([call(0, 1, ("a", 0), ("b", 1))], "b"),  # adapter a answered nothing before it was lost
        ([call(0, 9, ("late", 1)), call(1, 2, ("early", 1))], "early"),
        ([call(0, None), call(1, 2, ("a", 1))], "a"),
        ([call(3, None, ("a", 1)), call(4, 5, ("b", 1))], "a"),
    ],
)
def test_the_version_of_a_session_is_that_of_its_first_sampled_token(calls, version):
    assert first_version(calls) == first_version(calls[::-1]) == version
