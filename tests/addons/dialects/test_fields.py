import pytest

from rolltap.addons.dialects.call import DialectError
from rolltap.addons.dialects.fields import Fields, Wording
from tests.addons.dialects.apis import CHAT, GEMINI, MESSAGES, RESPONSES, USER

BODY = {
    "a": "x",
    "no": "",
    "n": 3,
    "yes": True,
    "list": [{"b": {"c": 1}}],
    "texts": ["x", "", "y"],
    "mixed": ["x", 5],
}
FIELDS = Fields(BODY, Wording("At {place}: {expected}.", index="<{}>", name=str.upper))


@pytest.mark.parametrize(
    ("read", "key", "value"),
    [
        (Fields.text, "no", ""),
        (Fields.name, "a", "x"),
        (Fields.positive_integer, "n", 3),
        (Fields.texts, "a", ["x"]),
        (Fields.texts, "texts", ["x", "y"]),
        (Fields.texts, "gone", []),
        (Fields.elements, "gone", []),
        (Fields.texts_by_place, "a", {"A": "x"}),
        (Fields.texts_by_place, "n", {}),
    ],
)
def test_a_valid_field_is_returned(read, key, value):
    assert read(FIELDS, key) == value
    assert FIELDS.optional(key, read) == (None if key == "gone" else value)


@pytest.mark.parametrize(
    ("read", "key", "sentence"),
    [
        (Fields.text, "gone", "At GONE: a string."),
        (Fields.name, "no", "At NO: a non-empty string."),
        (Fields.positive_integer, "yes", "At YES: a positive integer."),
        (Fields.object, "list", "At LIST: an object."),
        (lambda fields, key: list(fields.objects(key)), "a", "At A: a list."),
        (lambda fields, key: list(fields.objects(key)), "texts", "At TEXTS<0>: an object."),
        (Fields.texts, "n", "At N: a list."),
        (Fields.texts, "mixed", "At MIXED<1>: a string."),
        (lambda fields, key: fields.choice(key, ("y", "z")), "a", "At A: 'y' or 'z', not 'x'."),
        (
            lambda fields, key: next(fields.objects("list")).inner("b").text(key),
            "c",
            "At LIST<0>.B.C: a string.",
        ),
        (
            lambda fields, key: fields.inner("gone").inner("b").text(key),
            "c",
            "At GONE.B.C: a string.",
        ),
    ],
)
def test_a_refusal_names_the_place_and_the_expected_value(read, key, sentence):
    with pytest.raises(DialectError) as refusal:
        read(FIELDS, key)
    assert str(refusal.value) == sentence


@pytest.mark.parametrize(
    ("api", "body", "sentence"),
    [
        (CHAT, {"messages": [{"content": [5]}]}, "'messages[0].role' must be "),
        (RESPONSES, {"input": [USER | {"content": [5]}]}, "'input[0].content[0]' must be "),
        (
            MESSAGES,
            {"max_tokens": 1, "messages": [USER | {"content": [5]}]},
            "messages.0.content.0: Input should be ",
        ),
        (
            GEMINI,
            {"contents": [{"parts": 5}]},
            "Invalid value at 'contents[0].parts': it must be a list",
        ),
    ],
    ids=lambda value: getattr(value, "dialect", None) and value.dialect.NAME,
)
def test_each_api_has_its_own_wording(api, body, sentence):
    with pytest.raises(DialectError) as refusal:
        api.decode(body)
    assert str(refusal.value).startswith(sentence)
