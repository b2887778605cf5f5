import pytest

from rolltap.addons.prompts.canonical import echoed_reasoning, issued_forms

LITELLM = "[System: Empty message content sanitised to satisfy protocol]"


def forms(content, **more):
    echo = {"role": "assistant", "content": content, **more}
    return [(form["content"], reasoning) for form, reasoning in issued_forms(echo)]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", []),
        ("Hi.", [("Hi.\n", None)]),
        ("Hi.\n", [("Hi.", None)]),
        ("<think>\nHm.\n</think>\n\nHi.", [("Hi.", "Hm."), ("Hi.\n", "Hm.")]),
        ("<think>Hm.</think>", [("", "Hm.")]),
        ("<think>Hm.", [("<think>Hm.\n", None)]),
        (LITELLM, [(LITELLM + "\n", None)]),
    ],
)
def test_the_forms_of_an_echo(content, expected):
    assert forms(content) == expected


def test_a_text_for_no_text_counts_only_beside_tool_calls():
    assert ("", None) in forms(LITELLM, tool_calls=[{"id": "c1"}])


def test_the_reasoning_of_an_echo_is_its_field_or_its_text_in_front():
    assert echoed_reasoning({"content": "<think>a</think>Hi.", "reasoning_content": "b"}) == "b"
    assert echoed_reasoning({"content": "<think>\na\n</think>Hi."}) == "a"
    assert echoed_reasoning({"content": "Hi."}) == ""
