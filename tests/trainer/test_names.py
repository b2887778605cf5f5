"""Names of files, of models, of published weights and of sessions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.trainer.names import Seat, SessionName, Version, file_name, public_model


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("s-1", "s-1"),
        ("a/b", "a%2Fb"),
        ("..", "%2E."),
        ("../x", "%2E.%2Fx"),
        (".x", "%2Ex"),
        ("%2E", "%252E"),
    ],
)
def test_a_name_is_the_text_with_special_characters_of_paths_encoded(text, name):
    assert file_name(text) == name


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=400))
def test_any_text_is_one_visible_file_however_long(text):
    name = file_name(text)
    assert 0 < len(name.encode()) <= 200
    assert "/" not in name
    assert not name.startswith(".")


def test_long_texts_that_differ_at_the_end_have_different_names():
    assert file_name("x" * 300 + "a") != file_name("x" * 300 + "b")


CACHED = "/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-4B/snapshots/1cfa9a7208912126459214e8"


@pytest.mark.parametrize(
    ("model", "public"),
    [
        ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B"),
        ("/home/me/models/qwen3-4b", "qwen3-4b"),
        ("./models/qwen3-4b", "qwen3-4b"),
        (CACHED, "Qwen/Qwen3-4B"),
        ("/c/models--a-b--c--d/snapshots/0a/", "a-b/c--d"),
        ("tiny", "tiny"),
        ("", ""),
    ],
)
def test_a_model_has_its_name_on_the_hub_or_that_of_its_folder(model, public):
    assert public_model(model) == public


def test_a_folder_that_looks_like_a_name_is_no_name_on_the_hub(tmp_path, monkeypatch):
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert public_model("models/mine") == "mine"


@given(st.from_regex(r"[0-9a-f]{8}", fullmatch=True), st.integers(0), st.integers(0))
def test_a_version_is_read_back_from_its_name(run, step, attempt):
    version = Version(run, step, attempt)
    assert Version.parse(str(version)) == version


@pytest.mark.parametrize(
    "name",
    [
        "default",
        "",
        "7",
        "1a2b3c4d.7",
        "1A2B3C4D.7.0",
        "1a2b3c4d.7.0.0",
        "1a2b3c4d.07.0",
        "1a2b3c4d.7.0\n",
    ],
)
def test_names_of_other_weights_are_no_version(name):
    assert Version.parse(name) is None


@given(st.text(), st.integers(0, 3))
def test_a_session_is_read_back_from_its_id_and_attempts_share_their_place(session_id, further):
    first = SessionName.parse(session_id)
    assert str(first) == session_id
    name = first
    for _ in range(further):
        name = name.next
    assert SessionName.parse(str(name)) == name
    assert (name.place, name.attempt) == (first.place, first.attempt + further)


@pytest.mark.parametrize(
    ("place", "attempt", "seat"),
    [
        ("t-1a2b3c4d.0-3", "", Seat("t-1a2b3c4d.0", 3, None)),
        ("t-1a2b3c4d.0-3", "~2", Seat("t-1a2b3c4d.0", 3, None)),
        ("t-1a2b3c4d.7.1-3.2", "~1", Seat("t-1a2b3c4d.7.1", 3, 2)),
        ("fork~t-1a2b3c4d.7.1-3.2~1-0.4", "", Seat("fork~t-1a2b3c4d.7.1-3.2~1", 0, 4)),
        ("group-name", "", None),
        ("t-1~0", "", None),
        ("t-1.2.3", "", None),
    ],
)
def test_a_session_of_a_group_has_its_seat_in_its_id(place, attempt, seat):
    name = SessionName.parse(place + attempt)
    assert (name.place, name.seat) == (place, seat)
    assert name.attempt == int(attempt[1:] or 0)
