from rolltap.addons.dialects.anthropic.claude_code import normal_arguments
from rolltap.addons.dialects.model_call import ModelCall
from rolltap.addons.prompts.canonical import fingerprint, first_digest, opening_digest


def test_a_message_that_is_nested_too_deeply_equals_no_other():
    deep = {"role": "user", "content": ""}
    assert fingerprint(deep) == fingerprint(dict(deep)) != fingerprint({**deep, "content": 0})
    for _ in range(3000):
        deep = {"deep": deep}
    assert fingerprint(deep) != fingerprint(deep)


def test_an_opening_does_not_depend_on_the_echo_rule():
    messages = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Go"}]
    claude, other = (ModelCall("m", messages, [], echo_rule=rule) for rule in (normal_arguments, None))
    assert first_digest(claude) != first_digest(other)
    assert opening_digest(claude) == opening_digest(other) != opening_digest(ModelCall("m", messages[1:], []))
