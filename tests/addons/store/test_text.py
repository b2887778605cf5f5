from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.store.rows import printable


@given(st.binary())
def test_any_bytes_become_text_that_can_be_stored_and_shown(data):
    text = printable(data.decode(errors="surrogateescape"), None)
    text.encode()
    assert text.isprintable()


@given(st.text(st.characters(exclude_categories=["C", "Z"]), max_size=500))
def test_printable_text_stays(text):
    assert printable(text) == text


def test_a_long_text_is_cut_and_says_so():
    assert printable("x" * 2000) == "x" * 500 + "... (2,000 characters)"
