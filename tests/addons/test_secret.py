import os
import socket

import pytest

from rolltap.addons.errors import InputError
from rolltap.addons.secret import read_secret


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "secret"
    path.write_text("key\n")
    path.chmod(0o600)
    return path


def test_a_file_of_its_user_alone_holds_a_secret(file):
    assert read_secret(str(file)) == "key"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o777])
def test_a_file_that_others_can_read_is_refused_with_the_command_that_mends_it(file, mode):
    file.chmod(mode)
    with pytest.raises(InputError, match=rf"other users may read the secret in .*: chmod 600 {file}"):
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


@pytest.mark.parametrize(("contents", "message"), [(b" \n", "is empty"), (b"\xff", "cannot read the secret in")])
def test_a_file_without_a_secret_is_an_error(file, contents, message):
    file.write_bytes(contents)
    with pytest.raises(InputError, match=message):
        read_secret(file)
