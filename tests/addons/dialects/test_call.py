import base64

from rolltap.addons.dialects.call import sign, signed_call


def test_a_signature_that_is_long_was_not_issued_here():
    assert signed_call(sign("c7")) == "c7"
    assert signed_call(base64.b64encode(b"rolltap:" + b"A" * 1_000_000).decode()) is None
