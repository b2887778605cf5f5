"""The runtime `harbor`: Harbor's own package, with a cheap environment of ours."""

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
from rolltap.trainer.boxes.runtime import Ended, Mount
from rolltap.trainer.judges.channel import Channel
from rolltap.trainer.tasks import task
from rolltap.trainer.tasks.task import Build, Limits
from rolltap.trainer.traces.reader import load_sessions
from tests.boxes import sh, wait_until_dead
from tests.harbor import PYTHON, folder_environment
from tests.scripted_engine import Say
from tests.trainer.boxes.remote.conftest import ROOT
from tests.trainer.cli.program import run_rolltap

pytestmark = pytest.mark.usefixtures("harbor")


@pytest.fixture
def boxes(tmp_path):
    """Return a function that lists the environments that are there."""
    return lambda: os.listdir(tmp_path / "boxes")


@pytest.fixture
def run(harbor, harbor_spec, tmp_path):
    """Return a function that runs a script in a box of its own, and returns its end and its
    output."""

    async def run(script="true", *, spec=None, **settings):
        async with harbor(**settings).box(spec or harbor_spec()) as box:
            return await sh(box, script, tmp_path / "log")

    return run


async def test_the_output_has_the_errors_as_well_in_their_order(run):
    _, said = await run("echo one; echo two >&2; echo three")
    assert said == "one\ntwo\nthree\n"


async def test_all_that_a_program_left_is_killed_when_it_ends(harbor, harbor_spec, tmp_path):
    spec = harbor_spec()
    script = "(setsid sleep 1000 & echo $! >pid); grep -c . /proc/$(cat pid)/cmdline"
    async with harbor().box(spec) as box:
        ended, _ = await sh(box, script, tmp_path / "log")
        assert ended == Ended(0)
        assert wait_until_dead(int((spec.workspace / "pid").read_text()))


async def test_a_program_is_stopped_at_its_time_and_its_changes_count(
    harbor, harbor_spec, tmp_path, monkeypatch
):
    """Its time begins here when it has come that far."""
    come = "until [ -e {workdir}/made ]; do sleep 0.05; done; sleep {timeout:.3f}"
    script = harbor_program._RUN.replace("sleep {timeout:.3f}", come)
    monkeypatch.setattr(harbor_program, "_RUN", script)
    spec = harbor_spec()
    async with harbor().box(spec) as box:
        script = "echo begun; touch made; exec sleep 1000"
        ended, said = await sh(box, script, tmp_path / "log", timeout=0.5)
    assert ended == Ended(None, "timeout")
    assert said == "begun\n"
    assert (spec.workspace / "made").exists()


FLOODS = """
exec >"$1"
echo $$ >{pid}
printf %02000000d 0
exec sleep 1000
"""


async def test_a_download_is_ended_at_the_disk_limit_while_it_comes(
    run, harbor, harbor_spec, tmp_path, monkeypatch
):
    sends = FLOODS.format(pid=tmp_path / "pid")
    spec = harbor_spec(limits=Limits(disk_gib=0.001))
    ended, _ = await run(spec=spec, sends=sends)
    assert ended == Ended(None, "disk")
    assert wait_until_dead(int((tmp_path / "pid").read_text()))
    # without a limit of its own a box has that of runtimes that isolate
    monkeypatch.setitem(task._ISOLATED, "disk_gib", 0.001)
    ended, _ = await run(sends=sends)
    assert ended == Ended(None, "disk")
    copy_out = harbor(sends=sends).copy_out
    with pytest.raises(InputError, match=r"cannot be copied: it has more than 0\.001 GiB"):
        await asyncio.to_thread(copy_out, "an-image", "/start", tmp_path / "start")


async def test_a_box_sends_no_workspace_that_is_over_its_disk_limit(run, harbor_spec):
    spec = harbor_spec(limits=Limits(disk_gib=0.001))
    (spec.workspace / "kept.txt").write_text("kept\n")
    script = "echo said; rm kept.txt; head -c 3000000 /dev/urandom >large"
    assert await run(script, spec=spec) == (Ended(None, "disk"), "said\n")
    assert os.listdir(spec.workspace) == ["kept.txt"]


@pytest.mark.parametrize(
    ("proxy", "policy"),
    [
        ("127.0.0.1:1", {"network_mode": "allowlist", "allowed_hosts": ["recorder.example"]}),
        (None, {"network_mode": "no-network", "allowed_hosts": []}),
    ],
)
async def test_a_box_reaches_the_recorder_alone_where_harbor_can_restrict_it(
    harbor, harbor_spec, tmp_path, proxy, policy
):
    runtime = harbor(restricts=True)
    runtime.check()
    assert runtime.warning is None
    spec = harbor_spec(proxy=proxy)
    async with runtime.box(spec) as box:
        assert box.proxy == ("recorder.example:8443" if proxy else None)
        kept = tmp_path / "boxes" / spec.name / "policy.json"
        assert json.loads(kept.read_text()) == policy


def test_a_box_says_at_the_start_when_harbor_cannot_restrict_it(harbor):
    runtime = harbor()
    runtime.check()
    assert "cannot restrict the network" in runtime.warning


async def test_the_death_of_harbors_process_ends_its_boxes_and_later_ones_have_another(
    harbor, harbor_spec, tmp_path, boxes
):
    runtime = harbor()
    spec = harbor_spec()
    async with runtime.box(spec) as box:
        begun = tmp_path / "boxes" / spec.name / "tmp" / "begun"
        os.mkfifo(begun)
        script = "echo >/tmp/begun; exec sleep 1000"
        running = asyncio.create_task(sh(box, script, tmp_path / "log"))
        await asyncio.to_thread(begun.read_text)
        kept = runtime.process.folder
        assert kept.exists()
        os.kill(runtime.process.process.pid, signal.SIGKILL)
        with pytest.raises(OSError, match="Harbor's process ended with status -9"):
            await running
    assert boxes() == []  # the next process removed it by its name
    assert not kept.exists()
    async with runtime.box(harbor_spec()) as box:
        ended, _ = await sh(box, "true", tmp_path / "log")
    assert ended == Ended(0)


async def test_a_session_that_is_cancelled_leaves_no_environment(
    harbor, harbor_spec, tmp_path, boxes
):
    spec = harbor_spec()
    begun = tmp_path / "begun"
    os.mkfifo(begun)

    async def play():
        async with harbor().box(spec) as box:
            os.link(begun, tmp_path / "boxes" / spec.name / "tmp" / "begun")
            await sh(box, "echo >/tmp/begun; exec sleep 1000", tmp_path / "log")

    playing = asyncio.create_task(play())
    await asyncio.to_thread(begun.read_text)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert boxes() == []


async def test_what_a_hostile_box_sends_back_leads_nowhere(run, harbor_spec, tmp_path):
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
        spec = harbor_spec(workdir="/a/b", mounts=[Mount(pipe, "/rolltap/verdict")])
        assert await run(spec=spec, sends=f'cp {sent} "$1"') == (Ended(None, "disk"), "")
        channel.read()
    assert channel.content == b""
    assert os.listdir(spec.workspace) == []
    left = [str(path.relative_to(secret)) for path in secret.rglob("*") if path.is_file()]
    assert sorted(left) == files


@pytest.mark.parametrize("sends", ['ln -s {}/of-others "$1"', 'mkdir "$1"'])
async def test_what_is_no_archive_is_not_read(run, harbor_spec, tmp_path, sends):
    """A box may send a link to an archive that is here, or a folder."""
    with tarfile.open(tmp_path / "of-others", "w:gz") as packed:
        packed.add(__file__, "testbed/secret")
    spec = harbor_spec()
    ended, _ = await run(spec=spec, sends=sends.format(tmp_path))
    assert ended == Ended(None, "disk")
    assert os.listdir(spec.workspace) == []


async def test_a_hostile_box_that_says_no_status_is_a_fault_of_the_box(
    harbor, harbor_spec, tmp_path, monkeypatch
):
    said = [f"token {'9' * 5000} ended", "token 1 dead", "token x ended", ""]

    async def execute(*_):
        return said.pop()

    async with harbor().box(harbor_spec()) as box:
        monkeypatch.setattr(secrets, "token_hex", lambda _: "token")
        monkeypatch.setattr(box, "_execute", execute)
        while said:
            with pytest.raises(OSError, match="ran no program"):
                await sh(box, "true", tmp_path / "log")


async def test_what_a_command_in_a_hostile_box_says_is_bounded(harbor, harbor_spec):
    async with harbor().box(harbor_spec()) as box:
        said = await box._execute("head -c 9000000 /dev/zero | tr '\\0' x; echo end", 60)
    assert said == "x" * ((64 << 10) - 4) + "end\n"


async def test_what_a_box_has_no_more_may_be_there_in_the_next_one(harbor, harbor_spec, tmp_path):
    async with harbor().box(harbor_spec()) as box:
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


def test_environments_end_with_rolltap_by_kill_too(tmp_path, boxes):
    command = [sys.executable, "-c", OPENS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as rolltap:
        harbor = int(rolltap.stdout.readline())
        assert boxes() == ["rolltap-killed"]
        rolltap.kill()
    assert wait_until_dead(harbor)
    assert boxes() == []


async def test_an_environment_that_does_not_start_may_start_later(run):
    with pytest.raises(OSError, match="RuntimeError: no room in the cloud"):
        await run(fails="no room in the cloud")


REFUSED = [
    ("/no/python", {}, "Harbor's Python /no/python cannot be started: No such file"),
    (sys.executable, {}, "has no Harbor 0.25 .*ModuleNotFoundError.*--harbor-python"),
    (PYTHON, {"type": "podman", "colour": 1}, "has no key colour; its keys are .*kwargs"),
    (PYTHON, {"type": "moon"}, "^Harbor: the key type .* is 'moon': Input[^\n]*daytona"),
    (PYTHON, {"import_path": "no_such:Thing"}, "no_such"),
    (PYTHON, {"type": "daytona"}, "Daytona"),
]


@pytest.mark.parametrize(("python", "made", "message"), REFUSED)
def test_a_harbor_that_cannot_make_boxes_is_refused_at_the_start(python, made, message):
    with pytest.raises(InputError, match=f"(?s){message}"):
        HarborRuntime(Path(python), made, "recorder.example:8443").check()


def test_another_version_of_harbor_is_refused(harbor, monkeypatch):
    monkeypatch.setattr("rolltap.trainer.boxes.remote.harbor.VERSION", "0.99")
    with pytest.raises(InputError, match=r"has Harbor 0\.25\.0, .* interface of 0\.99: install"):
        harbor().check()


async def test_images_have_workspaces_and_dockerfiles_are_built_by_harbor(
    harbor, harbor_spec, tmp_path, boxes
):
    runtime = harbor()
    await asyncio.to_thread(runtime.copy_out, "an-image", "/start", tmp_path / "start")
    assert (tmp_path / "start" / "of-image.txt").read_text() == "an-image"
    with pytest.raises(InputError, match="the folder /nowhere of the image an-image cannot be"):
        await asyncio.to_thread(runtime.copy_out, "an-image", "/nowhere", tmp_path / "start")
    folder = tmp_path / "build"
    folder.mkdir()
    (folder / "Dockerfile").write_text("FROM built")
    log = tmp_path / "build.log"
    await runtime.build("localhost/rolltap-build:1", Build(folder=folder), log)
    async with runtime.box(harbor_spec("localhost/rolltap-build:1")) as box:
        _, said = await sh(box, "cat /start/of-image.txt", tmp_path / "log")
    assert said == "FROM built"
    hasty = Build(folder=folder, timeout=0.001)
    with pytest.raises(InputError, match=r"cannot be built: .* did not end within 0\.001 s"):
        await runtime.build("localhost/rolltap-build:2", hasty, log)
    assert boxes() == []


ASKS = """
import json, urllib.request
ask = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
headers = {"content-type": "application/json"}
url = "https://api.openai.com/v1/chat/completions"
request = urllib.request.Request(url, json.dumps(ask).encode(), headers)
with urllib.request.urlopen(request, timeout=600) as reply:
    said = json.load(reply)["choices"][0]["message"]["content"]
open("answer.txt", "w").write(said)
"""

JUDGES = """
import os
os.write(int(os.environ["ROLLTAP_REWARD_FD"]), open("answer.txt", "rb").read())
"""


def test_a_rollout_in_boxes_of_harbor_is_recorded_at_a_public_address_and_judged(
    tmp_path, scripted_engine, tokenizer_folder, boxes
):
    scripted_engine.otherwise = lambda request: Say("0.5")
    judge = {"kind": "command", "command": ["python3", "judge.py"], "result": "number"}
    start = tmp_path / "start"
    start.mkdir()
    (start / "judge.py").write_text(JUDGES)
    task = {"id": "t", "instruction": "Say it.", "image": "an-image", "judge": judge}
    (tmp_path / "tasks.jsonl").write_text(json.dumps({**task, "workspace": str(start)}))
    preset = tmp_path / "harness.toml"
    headless = json.dumps(["-c", ASKS])
    preset.write_text(f'name = "x"\nversion = "1"\nprogram = "python3"\nheadless = {headless}\n')
    environment = tmp_path / "environment.json"
    environment.write_text(json.dumps(folder_environment(tmp_path / "boxes")))
    # nobody else listens there
    host = f"127.{secrets.randbelow(200) + 1}.{secrets.randbelow(256)}.7"
    ended = run_rolltap(
        *("rollout", tmp_path / "tasks.jsonl", "--harness", preset, "-n", 2, "--json"),
        *("--runtime", "harbor", "--harbor-python", PYTHON, "--harbor-environment", environment),
        *("--recorder-address", f"{host}:8899"),
        *("--set", f"listen_host={host}", "--set", "listen_port=8899"),
        *("--out", tmp_path / "run", "--engine", scripted_engine.url, "--model", tokenizer_folder),
    )
    assert ended.returncode == 0, ended.stderr
    rows = load_sessions(tmp_path / "run").values()
    found = [(row.status, row.reward, row.runtime) for row in rows]
    assert found == [("completed", 0.5, "harbor")] * 2
    assert boxes() == []
