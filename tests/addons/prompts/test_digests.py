from rolltap.addons.prompts.digests import fingerprint


def test_a_message_that_is_nested_too_deeply_equals_no_other():
    deep = {"role": "user", "content": ""}
    assert fingerprint(deep) == fingerprint(dict(deep)) != fingerprint({**deep, "content": 0})
    for _ in range(3000):
        deep = {"deep": deep}
    assert fingerprint(deep) != fingerprint(deep)
