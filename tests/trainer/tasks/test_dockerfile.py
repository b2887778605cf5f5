import pytest

from rolltap.trainer.tasks.harbor import is_plain_system, read_dockerfile


def read(folder, text):
    (folder / "Dockerfile").write_text(text)
    return read_dockerfile(folder / "Dockerfile")


def test_a_dockerfile_that_only_copies_needs_no_build(tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("a.txt", "b.txt", "with space"):
        (tmp_path / name).touch()
    says = read(
        tmp_path,
        "# syntax=docker/dockerfile:1\n"
        "FROM python:3.13-slim\n\nWORKDIR /app\nWORKDIR sub\n"
        'ENV A=1 B="two words"\nENV C three words\n'
        "# a comment\nCOPY data .\nCOPY a.txt \\\n  # inside\n  b.txt /app/more/\nCOPY a.txt renamed\n"
        'copy ["with space", "/elsewhere/"]\nLABEL x=1\nCMD ["bash"]\nEXPOSE 80\n',
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


@pytest.mark.parametrize(
    ("lines", "unclear"),
    [
        ("FROM a\nRUN apt-get update \\\n  && true", "line 2: RUN apt-get update  && true"),
        ("FROM a\nCOPY --from=b /x /y", "line 2: COPY --from=b /x /y"),
        ("FROM a\nCOPY *.txt /y", "line 2: COPY *.txt /y"),
        ("FROM a\nCOPY missing /y", "line 2: COPY missing /y"),
        ("FROM a\nCOPY ../x /y", "line 2: COPY ../x /y"),
        ("FROM a AS b", "line 1: FROM a AS b"),
        ("FROM a\nFROM b", "line 2: FROM b"),
        ("ARG V=1\nFROM a:$V", "line 1: ARG V=1"),
        ("FROM a\nENV P=$PATH", "line 2: ENV P=$PATH"),
        ("FROM a\nUSER me", "line 2: USER me"),
        ("FROM a\nADD x /y", "line 2: ADD x /y"),
        ("FROM a\nCOPY <<EOF /y\nx\nEOF", "line 2: COPY <<EOF /y"),
    ],
)
def test_the_first_line_that_needs_a_build_is_named(tmp_path, lines, unclear):
    assert read(tmp_path, lines).unclear == unclear


def test_an_ignore_file_needs_a_build(tmp_path):
    (tmp_path / ".dockerignore").touch()
    assert read(tmp_path, "FROM a").unclear == "it has a .dockerignore"


def test_no_base_is_no_image(tmp_path):
    assert read(tmp_path, "FROM scratch").base is None


def test_official_systems_are_plain():
    assert all(map(is_plain_system, ["ubuntu:24.04", "python", "docker.io/library/debian@sha256:0", "alpine:3"]))
    assert not any(map(is_plain_system, ["me/python:3", "postgres:16", "ghcr.io/x/ubuntu", "pythonx"]))
