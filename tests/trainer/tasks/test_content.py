import pytest

from rolltap.trainer.tasks.content import matches


@pytest.mark.parametrize(
    ("pattern", "path", "found"),
    [
        ("**/conftest.py", "conftest.py", True),
        ("**/conftest.py", "a/b/conftest.py", True),
        ("**/conftest.py", "a/conftest.pyc", False),
        ("src/*.py", "src/a/b.py", False),
        ("src/*.py", "src/b.py", True),
        ("src", "src/a/b.py", True),
        ("src/", "src/a", True),
        ("a?c", "abc", True),
        ("a?c", "a/c", False),
        ("**/tests/**", "tests/a", True),
        ("**/tests/**", "src/tests/a/b", True),
        ("a.b", "axb", False),
    ],
)
def test_a_pattern_names_paths(pattern, path, found):
    assert matches(path, [pattern]) is found
