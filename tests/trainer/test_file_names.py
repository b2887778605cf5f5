import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.trainer.file_names import file_name


@pytest.mark.parametrize(
    ("text", "name"),
    [("s-1", "s-1"), ("a/b", "a%2Fb"), ("..", "%2E."), ("../x", "%2E.%2Fx"), (".x", "%2Ex"), ("%2E", "%252E")],
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
