import os
import subprocess

import pytest

from rolltap.trainer import folders

LEFT = {
    "a file": "touch file",
    "folders that are nested deeper than Python recurses": (
        'python3 -c \'\nimport os\nfor _ in range(1500): os.mkdir("d" * 20); os.chdir("d" * 20)\n\''
    ),
    "a folder that is closed": (
        "mkdir -p closed/inside; touch closed/inside/file; chmod 0 closed/inside closed"
    ),
    "a link to what must stay": "ln -s ../kept kept",
    "a FIFO and a name with a newline": "mkfifo fifo; touch 'a\nb' -- '-rf'",
}


@pytest.mark.parametrize("script", LEFT.values(), ids=list(LEFT))
def test_what_a_session_leaves_is_removed(tmp_path, monkeypatch, script):
    monkeypatch.setattr(folders.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    with folders.scratch_folder() as folder:
        subprocess.run(["sh", "-c", script], cwd=folder, check=True)
    assert os.listdir(tmp_path) == ["kept"]
    assert (tmp_path / "kept" / "file").exists()


def test_a_folder_that_cannot_be_removed_is_logged(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("rm", "chmod"):
        (tmp_path / name).write_text("#!/bin/sh\necho busy >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    folders.remove_folder(tmp_path / "x")
    assert "x could not be removed: busy" in caplog.text
