import pytest

from rolltap.trainer.runs.exports.sessions import without_paths


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("its output is in /home/me/runs/a.log.", "its output is in …/a.log."),
        ("in '/tmp/rolltap-x/workspace/'", "in '…/'"),
        ("file:///home/me/a.log", "…/a.log"),
        ("~/runs/a.log and ~/.cache/x/y", "…/a.log and …/y"),
        ('{"log": "/data/été/a.log"}', '{"log": "…/a.log"}'),
        ("src/a.py, ./b/c.py and ../d/e.py", "src/a.py, ./b/c.py and ../d/e.py"),
        ("https://host.example/a/b/c", "https://host.example/a/b/c"),
        ("tests/test_a.py::test_b[a/b]", "tests/test_a.py::test_b[a/b]"),
        ("1/2 of 3/4", "1/2 of 3/4"),
    ],
)
def test_absolute_paths_are_cut_to_their_last_part(text, public):
    assert without_paths(text) == public
