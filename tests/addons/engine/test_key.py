import stat

import pytest

from rolltap.addons.engine.key import KEY_FILE, make_key, read_key
from rolltap.addons.errors import InputError


def test_the_key_is_in_the_file_that_is_given_or_that_the_environment_names(tmp_path, monkeypatch):
    for name in ("one", "two"):
        (tmp_path / name).write_text(f"key-{name}\n")
    monkeypatch.delenv(KEY_FILE, raising=False)
    assert read_key() is None
    assert read_key(tmp_path / "one") == "key-one"
    monkeypatch.setenv(KEY_FILE, str(tmp_path / "two"))
    assert read_key() == "key-two"
    assert read_key(tmp_path / "one") == "key-one"


def test_a_new_key_is_for_this_user_alone_and_a_file_that_exists_is_kept(tmp_path):
    file = tmp_path / "key"
    make_key(file)
    key = read_key(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    make_key(file)
    assert read_key(file) == key
    make_key(tmp_path / "other")
    assert read_key(tmp_path / "other") != key


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"two words", b"line\nline", b"a\x00b", b"\xff\xfe", "schlüssel".encode()],
)
def test_a_file_that_holds_no_key_is_refused_and_not_shown(tmp_path, content):
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(
        InputError, match="does not hold one word of printable ASCII: give the file"
    ) as error:
        read_key(tmp_path / "key")
    assert not content.strip() or content.decode("latin-1") not in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(
        InputError, match=r"key file .*/missing cannot be read: No such file or directory"
    ):
        read_key(tmp_path / "missing")
