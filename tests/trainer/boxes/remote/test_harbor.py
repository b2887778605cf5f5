"""The runtime `harbor`: Harbor's own package, with its Podman environment and with a cheap one of
ours."""

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.inside import harbor_program
from rolltap.trainer.boxes.remote.harbor import HarborRuntime
from rolltap.trainer.boxes.runtime import Ended, ImageRuntime, Mount
from rolltap.trainer.judges.channel import Channel
from rolltap.trainer.tasks import task
from rolltap.trainer.tasks.task import Build, Limits
from rolltap.trainer.traces.reader import load_sessions
from tests.boxes import sh, spec_in, wait_until_dead
from tests.harbor import (
    PYTHON,
    environment,
    folder_environment,
    limits_of_podman,
    podman_image,
    projects,
    require_harbor,
)
from tests.scripted_engine import Say
from tests.trainer.cli.program import run_rolltap

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(autouse=True)
def _harbor(monkeypatch):
    require_harbor()
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for the tests' own environment


def make_runtime(tmp_path, **settings):
    made = folder_environment(tmp_path / "boxes", **settings)
    return HarborRuntime(PYTHON, made, "recorder.example:8443")


def make_spec(tmp_path, image="image", **fields):
    return spec_in(tmp_path, image=image, name=f"rolltap-{secrets.token_hex(4)}", **fields)


def boxes(tmp_path):
    """Return the names of the environments that are there."""
    return sorted(path.name for path in (tmp_path / "boxes").iterdir())


async def check_a_run(tmp_path, runtime, spec):
    """Run a program that changes a workspace, and check what it found and what came back."""
    (spec.workspace / "given.txt").write_text("given\n")
    (spec.workspace / "kept.txt").write_text("kept\n")
    (spec.workspace / "gone").mkdir()
    (spec.workspace / "gone" / "file").touch()
    kept = (spec.workspace / "kept.txt").stat()
    script = (
        "pwd; cat given.txt; echo new >made.txt; chmod +x made.txt; ln -s made.txt link; rm -r"
        " gone;echo more >>given.txt; ln made.txt hard; echo $HOME; exit 3"
    )
    async with runtime.box(spec) as box:
        assert (box.workdir, box.home, box.proxy) == (
            "/testbed",
            "/home/agent",
            "recorder.example:8443",
        )
        ended, said = await sh(box, script, tmp_path / "log")
    assert (ended.status, ended.stopped) == (3, None)
    assert said == "/testbed\ngiven\n/home/agent\n"
    assert (spec.workspace / "given.txt").read_text() == "given\nmore\n"
    assert os.access(spec.workspace / "made.txt", os.X_OK)
    assert os.readlink(spec.workspace / "link") == "made.txt"
    assert (spec.workspace / "hard").read_text() == "new\n"
    assert not (spec.workspace / "gone").exists()
    after = (spec.workspace / "kept.txt").stat()
    assert (after.st_ino, after.st_ctime_ns) == (kept.st_ino, kept.st_ctime_ns)


async def test_a_program_runs_on_a_copy_of_the_workspace_and_its_changes_come_back(tmp_path):
    await check_a_run(tmp_path, make_runtime(tmp_path), make_spec(tmp_path, proxy="127.0.0.1:1"))
    assert boxes(tmp_path) == []


@pytest.mark.deep
async def test_harbors_podman_environment_is_such_a_box_and_nothing_of_it_is_left(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("CONTAINERS_CONF", str(limits_of_podman(tmp_path)))
    with podman_image(tmp_path / "image") as image:
        runtime = HarborRuntime(PYTHON, environment(tmp_path), "recorder.example:8443")
        spec = make_spec(tmp_path, image, proxy="127.0.0.1:1", limits=Limits(memory_gib=0.5))
        await check_a_run(tmp_path, runtime, spec)
        assert projects(spec.name) == []


async def test_the_output_has_the_errors_as_well_in_their_order(tmp_path):
    async with make_runtime(tmp_path).box(make_spec(tmp_path)) as box:
        _, said = await sh(box, "echo one; echo two >&2; echo three", tmp_path / "log")
    assert said == "one\ntwo\nthree\n"


async def test_all_that_a_program_left_is_killed_when_it_ends(tmp_path):
    spec = make_spec(tmp_path)
    script = "(setsid sleep 1000 & echo $! >pid); grep -c . /proc/$(cat pid)/cmdline"
    async with make_runtime(tmp_path).box(spec) as box:
        ended, _ = await sh(box, script, tmp_path / "log")
        assert ended == Ended(0)
        assert wait_until_dead(int((spec.workspace / "pid").read_text()))


async def test_a_program_is_stopped_at_its_time_and_its_changes_count(tmp_path, monkeypatch):
    """Its time begins here when it has come that far."""
    come = "until [ -e {workdir}/made ]; do sleep 0.05; done; sleep {timeout:.3f}"
    script = harbor_program._RUN.replace("sleep {timeout:.3f}", come)
    monkeypatch.setattr(harbor_program, "_RUN", script)
    spec = make_spec(tmp_path)
    async with make_runtime(tmp_path).box(spec) as box:
        ended, said = await sh(
            box, "echo begun; touch made; exec sleep 1000", tmp_path / "log", timeout=0.5
        )
    assert ended == Ended(None, "timeout")
    assert said == "begun\n"
    assert (spec.workspace / "made").exists()


async def test_a_signal_is_the_end_of_a_program_as_in_other_boxes(tmp_path):
    async with make_runtime(tmp_path).box(make_spec(tmp_path)) as box:
        ended, _ = await sh(box, "kill -SEGV $$", tmp_path / "log")
    assert ended == Ended(-signal.SIGSEGV)


async def test_a_program_that_is_not_there_is_named(tmp_path):
    async with make_runtime(tmp_path).box(make_spec(tmp_path)) as box:
        with pytest.raises(FileNotFoundError) as caught:
            await box.run(
                ["no-such-program"], env={"PATH": "/usr/bin"}, timeout=60, log=tmp_path / "log"
            )
    assert caught.value.filename == "no-such-program"


async def test_mounts_are_copies_and_a_verdict_comes_out_of_its_pipe(tmp_path):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "say").write_text("a tool\n")
    pipe = tmp_path / "verdict"
    async with Channel(pipe) as channel:
        mounts = [
            Mount(tmp_path / "tools", "/rolltap/tools"),
            Mount(pipe, "/logs/verifier/reward.txt"),
        ]
        async with make_runtime(tmp_path).box(make_spec(tmp_path, mounts=mounts)) as box:
            await sh(
                box, "cat /rolltap/tools/say; echo 0.5 >/logs/verifier/reward.txt", tmp_path / "log"
            )
            channel.read()
            assert (bytes(channel.content), channel.opened) == (b"0.5\n", 1)
            await sh(box, "true", tmp_path / "log")  # writes no verdict
            channel.read()
            assert channel.opened == 1
    assert (tmp_path / "log").read_text() == ""


async def test_more_than_the_disk_limit_is_a_program_at_its_limit(tmp_path):
    spec = make_spec(tmp_path, limits=Limits(disk_gib=0.001))
    async with make_runtime(tmp_path).box(spec) as box:
        ended, _ = await sh(box, "head -c 3000000 /dev/zero >large", tmp_path / "log")
    assert ended == Ended(None, "disk")


FLOODS = """
exec >"$1"
echo $$ >{pid}
printf %02000000d 0
exec sleep 1000
"""


async def test_a_download_is_ended_at_the_disk_limit_while_it_comes(tmp_path):
    runtime = make_runtime(tmp_path, sends=FLOODS.format(pid=tmp_path / "pid"))
    async with runtime.box(make_spec(tmp_path, limits=Limits(disk_gib=0.001))) as box:
        ended, _ = await sh(box, "true", tmp_path / "log")
    assert ended == Ended(None, "disk")
    assert wait_until_dead(int((tmp_path / "pid").read_text()))


async def test_a_box_without_a_limit_has_that_of_runtimes_that_isolate(tmp_path, monkeypatch):
    monkeypatch.setitem(task._ISOLATED, "disk_gib", 0.001)
    runtime = make_runtime(tmp_path, sends=FLOODS.format(pid=tmp_path / "pid"))
    async with runtime.box(make_spec(tmp_path)) as box:
        ended, _ = await sh(box, "true", tmp_path / "log")
    assert ended == Ended(None, "disk")
    with pytest.raises(InputError, match=r"cannot be copied: it has more than 0\.001 GiB"):
        await asyncio.to_thread(runtime.copy_out, "an-image", "/start", tmp_path / "start")


async def test_a_box_sends_no_workspace_that_is_over_its_disk_limit(tmp_path):
    spec = make_spec(tmp_path, limits=Limits(disk_gib=0.001))
    (spec.workspace / "kept.txt").write_text("kept\n")
    script = "echo said; rm kept.txt; head -c 3000000 /dev/urandom >large"
    async with make_runtime(tmp_path).box(spec) as box:
        ended, said = await sh(box, script, tmp_path / "log")
    assert ended == Ended(None, "disk")
    assert said == "said\n"
    assert [path.name for path in spec.workspace.iterdir()] == ["kept.txt"]


async def test_a_box_reaches_the_recorder_alone_where_harbor_can_restrict_it(tmp_path):
    runtime = make_runtime(tmp_path, restricts=True)
    runtime.check()
    assert runtime.warning is None
    policies = []
    for proxy in ("127.0.0.1:1", None):
        spec = make_spec(tmp_path, proxy=proxy)
        async with runtime.box(spec):
            policies.append(
                json.loads((tmp_path / "boxes" / spec.name / "policy.json").read_text())
            )
    assert policies == [
        {"network_mode": "allowlist", "allowed_hosts": ["recorder.example"]},
        {"network_mode": "no-network", "allowed_hosts": []},
    ]


async def test_a_box_says_at_the_start_when_harbor_cannot_restrict_it(tmp_path):
    runtime = make_runtime(tmp_path)
    runtime.check()
    assert "cannot restrict the network" in str(runtime.warning)


async def test_the_death_of_harbors_process_ends_its_boxes_and_later_ones_have_another(
    tmp_path,
):
    runtime = make_runtime(tmp_path)
    spec = make_spec(tmp_path)
    async with runtime.box(spec) as box:
        begun = tmp_path / "boxes" / spec.name / "tmp" / "begun"
        os.mkfifo(begun)
        running = asyncio.create_task(
            sh(box, "echo >/tmp/begun; exec sleep 1000", tmp_path / "log")
        )
        await asyncio.to_thread(begun.read_text)
        kept = runtime.process.folder
        assert kept.exists()
        os.kill(runtime.process.process.pid, signal.SIGKILL)
        with pytest.raises(OSError, match="Harbor's process ended with status -9"):
            await running
    assert boxes(tmp_path) == []  # the next process removed it by its name
    assert not kept.exists()
    async with runtime.box(make_spec(tmp_path)) as box:
        ended, _ = await sh(box, "true", tmp_path / "log")
    assert ended == Ended(0)


async def test_a_session_that_is_cancelled_leaves_no_environment(tmp_path):
    spec = make_spec(tmp_path)
    begun = tmp_path / "begun"
    os.mkfifo(begun)

    async def play():
        async with make_runtime(tmp_path).box(spec) as box:
            os.link(begun, tmp_path / "boxes" / spec.name / "tmp" / "begun")
            await sh(box, "echo >/tmp/begun; exec sleep 1000", tmp_path / "log")

    playing = asyncio.create_task(play())
    await asyncio.to_thread(begun.read_text)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert boxes(tmp_path) == []


async def test_what_a_hostile_box_sends_back_leads_nowhere(tmp_path):
    """The folders above the workspace and above our own files are links to others here."""
    secret = tmp_path / "secret"
    files = ["b/key", "rolltap/log", "rolltap/verdict-0"]
    for path in files:
        (secret / path).parent.mkdir(parents=True, exist_ok=True)
        (secret / path).write_text("a secret")
    sent = tmp_path / "sent.tar.gz"
    with tarfile.open(sent, "w:gz") as packed:
        for name in ("a", "tmp"):
            link = tarfile.TarInfo(name)
            link.type = tarfile.SYMTYPE
            link.linkname = str(secret)
            packed.addfile(link)
    pipe = tmp_path / "verdict"
    async with Channel(pipe) as channel:
        spec = make_spec(tmp_path, workdir="/a/b", mounts=[Mount(pipe, "/rolltap/verdict")])
        async with make_runtime(tmp_path, sends=f'cp {sent} "$1"').box(spec) as box:
            ended, said = await sh(box, "true", tmp_path / "log")
            channel.read()
    assert (ended, said, bytes(channel.content)) == (Ended(None, "disk"), "", b"")
    assert list(spec.workspace.iterdir()) == []
    left = [str(path.relative_to(secret)) for path in secret.rglob("*") if path.is_file()]
    assert sorted(left) == files


async def test_what_is_no_archive_is_not_read(tmp_path):
    """A box may send a link to an archive that is here, or a folder."""
    with tarfile.open(tmp_path / "of-others", "w:gz") as packed:
        packed.add(__file__, "testbed/secret")
    sends = {"link": f'ln -s {tmp_path}/of-others "$1"', "folder": 'mkdir "$1"'}
    for name, script in sends.items():
        spec = make_spec(tmp_path)
        async with make_runtime(tmp_path, sends=script).box(spec) as box:
            ended, _ = await sh(box, "true", tmp_path / "log")
        assert ended == Ended(None, "disk"), name
        assert list(spec.workspace.iterdir()) == [], name


async def test_a_hostile_box_that_says_no_status_is_a_fault_of_the_box(tmp_path, monkeypatch):
    async with make_runtime(tmp_path).box(make_spec(tmp_path)) as box:
        monkeypatch.setattr(secrets, "token_hex", lambda _: "token")
        for said in (f"token {'9' * 5000} ended", "token 1 dead", "token x ended", ""):

            async def execute(*_, said=said):
                return said

            monkeypatch.setattr(box, "_execute", execute)
            with pytest.raises(OSError, match="ran no program"):
                await sh(box, "true", tmp_path / "log")


async def test_what_a_command_in_a_hostile_box_says_is_bounded(tmp_path):
    async with make_runtime(tmp_path).box(make_spec(tmp_path)) as box:
        said = await box._execute("head -c 9000000 /dev/zero | tr '\\0' x; echo end", 60)
    assert said == "x" * ((64 << 10) - 4) + "end\n"


async def test_what_a_box_has_no_more_may_be_there_in_the_next_one(tmp_path):
    async with make_runtime(tmp_path).box(make_spec(tmp_path)) as box:
        with pytest.raises(OSError, match="FileNotFoundError"):
            await box._send("download", source="/gone", target=str(tmp_path / "to"), limit=1)


OPENS = """
import asyncio, sys
from pathlib import Path
from rolltap.trainer.boxes.remote.harbor import HarborRuntime
from tests.boxes import spec_in
from tests.harbor import PYTHON, folder_environment

async def main(folder):
    runtime = HarborRuntime(PYTHON, folder_environment(folder / "boxes"), "recorder.example:8443")
    async with runtime.box(spec_in(folder, image="image", name="rolltap-killed")):
        print(runtime.process.process.pid, flush=True)
        await asyncio.sleep(1000)

asyncio.run(main(Path(sys.argv[1])))
"""


def test_environments_end_with_rolltap_by_kill_too(tmp_path):
    command = [sys.executable, "-c", OPENS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as rolltap:
        harbor = int(rolltap.stdout.readline())
        assert boxes(tmp_path) == ["rolltap-killed"]
        rolltap.kill()
    assert wait_until_dead(harbor)
    assert boxes(tmp_path) == []


async def test_an_environment_that_does_not_start_may_start_later(tmp_path):
    with pytest.raises(OSError, match="RuntimeError: no room in the cloud"):
        async with make_runtime(tmp_path, fails="no room in the cloud").box(make_spec(tmp_path)):
            pass


@pytest.mark.parametrize(
    ("python", "made", "message"),
    [
        ("/no/python", {}, "Harbor's Python /no/python cannot be started: No such file"),
        (sys.executable, {}, "has no Harbor 0.25 .*ModuleNotFoundError.*--harbor-python"),
        (
            PYTHON,
            {"type": "podman", "colour": 1},
            "Harbor's environment has no key colour; its keys are .*kwargs",
        ),
        (
            PYTHON,
            {"type": "moon"},
            "^Harbor: the key type of harbor_environment is 'moon': Input[^\n]*daytona",
        ),
        (PYTHON, {"import_path": "no_such:Thing"}, "no_such"),
        (PYTHON, {"type": "daytona"}, "Daytona"),
    ],
)
def test_a_harbor_that_cannot_make_boxes_is_refused_at_the_start(python, made, message):
    with pytest.raises(InputError, match=f"(?s){message}"):
        HarborRuntime(Path(python), made, "recorder.example:8443").check()


def test_another_version_of_harbor_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("rolltap.trainer.boxes.remote.harbor.VERSION", "0.99")
    with pytest.raises(
        InputError, match=r"has Harbor 0\.25\.0, .*knows the interface of 0\.99: install"
    ):
        make_runtime(tmp_path).check()


async def test_images_have_workspaces_and_dockerfiles_are_built_by_harbor(tmp_path):
    runtime = make_runtime(tmp_path)
    assert isinstance(runtime, ImageRuntime)
    await asyncio.to_thread(runtime.copy_out, "an-image", "/start", tmp_path / "start")
    assert (tmp_path / "start" / "of-image.txt").read_text() == "an-image"
    with pytest.raises(
        InputError, match="the folder /nowhere of the image an-image cannot be copied"
    ):
        await asyncio.to_thread(runtime.copy_out, "an-image", "/nowhere", tmp_path / "start")
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "Dockerfile").write_text("FROM built")
    await runtime.build(
        "localhost/rolltap-build:1", Build(folder=tmp_path / "build"), tmp_path / "build.log"
    )
    async with runtime.box(make_spec(tmp_path, "localhost/rolltap-build:1")) as box:
        _, said = await sh(box, "cat /start/of-image.txt", tmp_path / "log")
    assert said == "FROM built"
    hasty = Build(folder=tmp_path / "build", timeout=0.001)
    with pytest.raises(InputError, match=r"cannot be built: .* did not end within 0\.001 s"):
        await runtime.build("localhost/rolltap-build:2", hasty, tmp_path / "build.log")
    assert boxes(tmp_path) == []


ASKS = """
import json, urllib.request
ask = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
headers = {"content-type": "application/json"}
url = "https://api.openai.com/v1/chat/completions"
request = urllib.request.Request(url, json.dumps(ask).encode(), headers)
with urllib.request.urlopen(request, timeout=60) as reply:
    said = json.load(reply)["choices"][0]["message"]["content"]
open("answer.txt", "w").write(said)
"""

JUDGES = """
import os
os.write(int(os.environ["ROLLTAP_REWARD_FD"]), open("answer.txt", "rb").read())
"""


def test_a_rollout_in_boxes_of_harbor_is_recorded_at_a_public_address_and_judged(
    tmp_path, scripted_engine, tokenizer_folder
):
    scripted_engine.otherwise = lambda request: Say("0.5")
    judge = {"kind": "command", "command": ["python3", "judge.py"], "result": "number"}
    task = {"id": "t", "instruction": "Say it.", "image": "an-image", "judge": judge}
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "judge.py").write_text(JUDGES)
    (tmp_path / "tasks.jsonl").write_text(
        json.dumps({**task, "workspace": str(tmp_path / "start")})
    )
    preset = tmp_path / "harness.toml"
    headless = json.dumps(["-c", ASKS])
    preset.write_text(f'name = "x"\nversion = "1"\nprogram = "python3"\nheadless = {headless}\n')
    environment = tmp_path / "environment.json"
    environment.write_text(json.dumps(folder_environment(tmp_path / "boxes")))
    host = (  # nobody else listens there
        f"127.{secrets.randbelow(200) + 1}.{secrets.randbelow(256)}.7"
    )
    ended = run_rolltap(
        *("rollout", tmp_path / "tasks.jsonl", "--harness", preset, "-n", 2, "--json"),
        *("--runtime", "harbor", "--harbor-python", PYTHON, "--harbor-environment", environment),
        *("--recorder-address", f"{host}:8899"),
        *("--set", f"listen_host={host}", "--set", "listen_port=8899"),
        *("--out", tmp_path / "run", "--engine", scripted_engine.url, "--model", tokenizer_folder),
    )
    assert ended.returncode == 0, ended.stderr
    rows = load_sessions(tmp_path / "run")
    found = [(row.status, row.reward, row.runtime) for row in rows.values()]
    assert found == [("completed", 0.5, "harbor")] * 2
    assert boxes(tmp_path) == []
