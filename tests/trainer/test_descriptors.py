import resource

import pytest

from rolltap.trainer import descriptors
from rolltap.trainer.descriptors import make_room

UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "sessions", "raised_to", "warns"),
    [
        ((1024, 524288), 8, None, False),
        ((1024, 524288), 256, 6240, False),
        ((1024, UNLIMITED), 256, 6240, False),
        ((1024, 4096), 256, 4096, True),
        ((UNLIMITED, UNLIMITED), 256, None, False),
    ],
)
def test_the_limit_of_open_files_is_raised_to_what_the_sessions_need(
    monkeypatch, caplog, limits, sessions, raised_to, warns
):
    given = []
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(descriptors.resource, "setrlimit", lambda _, limits: given.append(limits))
    make_room(sessions)
    assert given == ([] if raised_to is None else [(raised_to, limits[1])])
    assert ("256 sessions at once need about 6240: raise it" in caplog.text) == warns
