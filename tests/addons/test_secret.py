import base64
import os
import socket

import pytest

from rolltap.addons.errors import InputError
from rolltap.addons.secret import parse_basic, password, read_secret, valid


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "secret"
    path.write_text("key\n")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o777])
def test_a_file_of_its_user_alone_holds_a_secret_and_one_that_others_can_read_is_refused(
    file, mode
):
    assert read_secret(str(file)) == "key"
    file.chmod(mode)
    with pytest.raises(
        InputError, match=rf"other users may read the secret in .*: chmod 600 {file}"
    ):
        read_secret(file)


def test_a_pipe_or_socket_is_read_to_its_end_and_closed():
    reader, writer = os.pipe()
    os.write(writer, b"key")
    os.close(writer)
    ours, theirs = socket.socketpair()
    ours.sendall(b"key")
    ours.close()
    for descriptor in (reader, theirs.detach()):
        assert read_secret(f"/dev/fd/{descriptor}") == "key"
        with pytest.raises(InputError, match="cannot read the secret in /dev/fd/"):
            read_secret(f"/dev/fd/{descriptor}")


@pytest.mark.parametrize(
    ("contents", "message"), [(b" \n", "is empty"), (b"\xff", "cannot read the secret in")]
)
def test_a_file_without_a_secret_is_an_error(file, contents, message):
    file.write_bytes(contents)
    with pytest.raises(InputError, match=message):
        read_secret(file)


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
