import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.dialects.call import sign, signed_call
from rolltap.addons.dialects.json_values import parse_json, well_formed

any_text = st.text(st.characters(categories=None) | st.sampled_from(["\ud83d", "\udc00"]))


@given(any_text)
def test_well_formed_text_is_utf8_and_changes_only_surrogates(text):
    formed = well_formed(text)
    assert formed.encode().decode() == formed
    assert formed == text or any(0xD800 <= ord(character) < 0xE000 for character in text)


@given(any_text, st.booleans())
def test_parsed_json_is_well_formed_all_the_way_down(text, ascii_only):
    parsed = parse_json(json.dumps({text: [text]}, ensure_ascii=ascii_only).encode("utf-8", "replace").decode())
    json.dumps(parsed, ensure_ascii=False).encode()
    if not any(0xD800 <= ord(character) < 0xE000 for character in text):
        assert parsed == {text: [text]}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"\ud83d\ude00 \ud83d", "😀 \ufffd"),
        (r"\\ud83d\ude00", "\\ud83d\ufffd"),
        (r"\ud83d\\\ude00", "\ufffd\\\ufffd"),
        (r"\ud83d\ud83d\ude00\ude00", "\ufffd😀\ufffd"),
    ],
)
def test_a_pair_of_surrogates_is_a_character_and_each_other_one_is_replaced(text, value):
    assert parse_json(f'"{text}"') == value


def test_pairs_are_not_written_as_json_again(monkeypatch):
    body = json.dumps({"content": "All right 👍 \\ud83d"})
    monkeypatch.setattr(json, "dumps", None)
    assert parse_json(body) == {"content": "All right 👍 \\ud83d"}


def test_a_signature_that_is_long_was_not_issued_here():
    assert signed_call(sign("c7")) == "c7"
    assert signed_call(base64.b64encode(b"rolltap:" + b"A" * 1_000_000).decode()) is None
