import base64

import pytest

from rolltap.addons.secret import parse_basic, password, valid


def basic(text):
    return "Basic " + base64.b64encode(text.encode()).decode()


def test_a_password_is_the_hmac_of_the_session_id():
    # RFC 4231, test case 2
    expected = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
    assert password("Jefe", "what do ya want for nothing?") == expected


@pytest.mark.parametrize(
    ("secret", "session_id", "password", "accepted"),
    [
        ("key", "s1", password("key", "s1"), True),
        ("key", "s1", password("key", "s2"), False),
        ("key", "s1", password("other", "s1"), False),
        ("key", "s1", "", False),
        ("key", "s1", "é", False),
        ("key", "", password("key", ""), False),
        ("key", "s\r\nx-other: 1", password("key", "s\r\nx-other: 1"), False),
        ("", "s1", "anything", True),
        ("", "s1", "", True),
        ("", "", "anything", False),
        ("", "s\n", "anything", False),
        ("key", "s9 ", password("key", "s9 "), False),
        ("", " s9", "anything", False),
    ],
    ids=[
        "its own",
        "another session's",
        "under another secret",
        "none",
        "not ASCII",
        "no session",
        "a header's end in the session",
        "any without a secret",
        "none without a secret",
        "no session, without a secret",
        "a header's end, without a secret",
        "a blank at the end",
        "a blank at the beginning",
    ],
)
def test_a_password_is_valid_for_its_session_only(secret, session_id, password, accepted):
    assert valid(secret, session_id, password) is accepted


@pytest.mark.parametrize(
    ("header", "credentials"),
    [
        (basic("s1:pass"), ("s1", "pass")),
        (basic("s1:pass").replace("Basic", "bAsIc"), ("s1", "pass")),
        (basic("s1:a:b"), ("s1", "a:b")),
        (basic("sé:"), ("sé", "")),
        (basic("s1"), ("s1", "")),
        (basic(":pass"), ("", "pass")),
        ("", None),
        ("Basic", ("", "")),
        ("Bearer x", None),
        ("Basic ***", None),
        ("Basic é", None),
        ("Basic /w==", None),
    ],
)
def test_basic_credentials_are_parsed(header, credentials):
    assert parse_basic(header) == credentials
