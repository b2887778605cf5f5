import pytest

from rolltap.trainer.tasks.content import matches


@pytest.mark.parametrize(
    ("pattern", "named", "others"),
    [
        ("**/conftest.py", ["conftest.py", "a/b/conftest.py"], ["a/conftest.pyc"]),
        ("src/*.py", ["src/b.py"], ["src/a/b.py"]),
        ("src", ["src/a/b.py"], []),
        ("src/", ["src/a"], []),
        ("a?c", ["abc"], ["a/c"]),
        ("**/tests/**", ["tests/a", "src/tests/a/b"], []),
        ("a.b", [], ["axb"]),
    ],
)
def test_a_pattern_names_paths(pattern, named, others):
    assert [path for path in named + others if matches(path, [pattern])] == named
