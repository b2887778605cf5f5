"""Images that the real engines build, of a small base image of this machine's programs."""

import os

import psutil
import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.containers.build import image_of
from rolltap.trainer.boxes.containers.container import ContainerRuntime
from rolltap.trainer.boxes.containers.engine import call
from rolltap.trainer.boxes.containers.images import image_id
from rolltap.trainer.tasks.task import Build
from tests.boxes import copy_programs, imported, make_spec, sh, wait_until_dead
from tests.deep import cases

MARKER = f"3600.{os.getpid()}"
DOCKERFILE = "FROM {base}\nLABEL test={label}\nRUN echo built > /made\nCOPY . /app\nWORKDIR /app\n"


@pytest.fixture(scope="module", params=cases(["podman", "docker"]))
def base(request, tmp_path_factory):
    """The engine's command line, and the name of an image with a shell and a few programs."""
    request.getfixturevalue(request.param)
    engine, root = (request.param,), tmp_path_factory.mktemp("base")
    root.chmod(0o755)
    copy_programs(root, "sh", "bash", "sleep", "cat", "ls")
    with imported(root, engine, "ENV PATH=/programs") as name:
        yield engine, name


@pytest.fixture
def build(base, tmp_path):
    """A function that returns a build with a Dockerfile, and the runtime. What it makes is removed
    at the end."""
    engine, name = base
    runtime = ContainerRuntime(*engine, build=True)
    label = f"{os.getpid()}-{tmp_path.name}"

    def build(dockerfile=DOCKERFILE, **fields):
        folder = tmp_path / "task" / "environment"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "Dockerfile").write_text(dockerfile.format(base=name, label=label, marker=MARKER))
        return Build(folder=folder, **fields)

    yield build, runtime
    if engine == ("podman",):  # the daemon of Docker is gone with all that it has
        images = call(
            ["podman", "image", "ls", "--all", "--quiet", "--filter", f"label=test={label}"]
        ).split()
        call(["podman", "image", "rm", "--force", *dict.fromkeys(images)])


async def test_a_built_image_has_the_folder_of_its_dockerfile_and_nothing_beside_it(
    build, tmp_path
):
    build, runtime = build
    asked = build()
    (asked.folder / "data").write_text("of the task")
    (asked.folder.parent / "solution").write_text("SECRET")
    image = image_of(asked)
    await runtime.build(image, asked, tmp_path / "logs" / "build.log")
    assert "echo built" in (tmp_path / "logs" / "build.log").read_text()
    async with runtime.box(make_spec(tmp_path, image=image, mounts=[], workdir="/work")) as box:
        _, output = await sh(box, "cat /made /app/data; ls /app", tmp_path / "log")
    assert output == "built\nof the taskDockerfile\ndata\n"
    runtime.copy_out(image, "/app", tmp_path / "start")
    assert sorted(path.name for path in (tmp_path / "start").iterdir()) == ["Dockerfile", "data"]
    assert runtime.image_digest(image).startswith("sha256:")


async def test_an_image_is_built_once_and_again_when_the_folder_changes(build, tmp_path):
    build, runtime = build
    asked = build()
    image = image_of(asked)
    await runtime.build(image, asked, tmp_path / "first")
    digest = runtime.image_digest(image)
    await runtime.build(image, asked, tmp_path / "second")
    assert not (tmp_path / "second").exists()
    assert runtime.image_digest(image) == digest
    changed = build(DOCKERFILE + "ENV A=1\n")
    assert image_of(changed) != image


@pytest.mark.parametrize(
    ("line", "timeout", "message"),
    [
        (
            "RUN echo why >&2; exit 3",
            120,
            r"its image cannot be built: .* ends with status \d+: .*echo why.* 3",
        ),
        ("RUN sleep {marker}", 3, r"environment does not end within 3 s: \S"),
    ],
)
async def test_a_build_that_fails_or_does_not_end_says_its_last_line(
    build, tmp_path, line, timeout, message
):
    build, runtime = build
    asked = build(DOCKERFILE + line + "\n", timeout=timeout)
    with pytest.raises(InputError, match=message):
        await runtime.build(image_of(asked), asked, tmp_path / "log")
    left = [
        each.pid
        for each in psutil.process_iter(["cmdline"])
        if MARKER in (each.info["cmdline"] or ())
    ]
    assert all(map(wait_until_dead, left))
    with pytest.raises(InputError, match="cannot be pulled"):
        image_id([*runtime._engine().command], image_of(asked))
