import pytest

from rolltap.trainer.tasks.dockerfile import is_plain_system, read_dockerfile


def read(folder, text):
    (folder / "Dockerfile").write_text(text)
    return read_dockerfile(folder / "Dockerfile")


def test_a_dockerfile_that_only_copies_needs_no_build(tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("a.txt", "b.txt", "with space"):
        (tmp_path / name).touch()
    says = read(
        tmp_path,
        "# syntax=docker/dockerfile:1\nFROM python:3.13-slim\n\nWORKDIR /app\nWORKDIR sub\nENV A=1"
        ' B="two words"\nENV C three words\n# a comment\nCOPY data .\nCOPY a.txt \\\n  # inside\n '
        ' b.txt /app/more/\nCOPY a.txt renamed\ncopy ["with space", "/elsewhere/"]\nLABEL x=1\nCMD'
        ' ["bash"]\nEXPOSE 80\n',
    )
    assert says.unclear is None
    assert (says.base, says.workdir) == ("python:3.13-slim", "/app/sub")
    assert says.env == {"A": "1", "B": "two words", "C": "three words"}
    assert {place: source.name for place, source in says.files.items()} == {
        "/app/sub": "data",
        "/app/more/a.txt": "a.txt",
        "/app/more/b.txt": "b.txt",
        "/app/sub/renamed": "a.txt",
        "/elsewhere/with space": "with space",
    }


NEED_A_BUILD = (
    "COPY --from=b /x /y|COPY *.txt /y|COPY missing /y|COPY ../x /y|FROM b|ENV P=$PATH|USER me|ADD"
    " x /y"
)


@pytest.mark.parametrize("line", NEED_A_BUILD.split("|"))
def test_the_first_line_that_needs_a_build_is_named(tmp_path, line):
    assert read(tmp_path, f"FROM a\n{line}").unclear == f"line 2: {line}"
    assert read(tmp_path, "FROM a\nCOPY <<EOF /y\nx\nEOF").unclear == "line 2: COPY <<EOF /y"
    assert read(tmp_path, "FROM a\nRUN apt \\\n  && true").unclear == "line 2: RUN apt  && true"
    for first in ("FROM a AS b", "ARG V=1"):
        assert read(tmp_path, f"{first}\nFROM a:$V").unclear == f"line 1: {first}"


def test_an_ignore_file_needs_a_build_and_no_base_is_no_image(tmp_path):
    (tmp_path / ".dockerignore").touch()
    assert read(tmp_path, "FROM a").unclear == "it has a .dockerignore"
    assert read(tmp_path, "FROM scratch").base is None
    assert all(
        map(
            is_plain_system,
            ["ubuntu:24.04", "python", "docker.io/library/debian@sha256:0", "alpine:3"],
        )
    )
    assert not any(
        map(is_plain_system, ["me/python:3", "postgres:16", "ghcr.io/x/ubuntu", "pythonx"])
    )
