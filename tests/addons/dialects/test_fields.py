import pytest

from rolltap.addons.dialects.call import DialectError
from tests.addons.dialects.apis import CHAT, GEMINI, MESSAGES, RESPONSES, USER


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
    ids=["chat", "responses", "messages", "gemini"],
)
def test_each_api_has_its_own_wording(api, body, sentence):
    with pytest.raises(DialectError) as refusal:
        api.decode(body)
    assert str(refusal.value).startswith(sentence)
