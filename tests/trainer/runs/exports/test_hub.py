import os
import subprocess
import tempfile
from io import BytesIO

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from datasets import load_dataset
from huggingface_hub import constants

from rolltap.addons.errors import HubError, InputError, RunError
from rolltap.addons.store.records import Event
from rolltap.trainer.cli.runs import export_command
from tests.factories import add_rows, make_call, make_session, says
from tests.factories import write_run as make_run
from tests.trainer.cli.program import ROLLTAP
from tests.trainer.outgoing import write_run
from tests.trainer.runs.exports.hub import loopback_hub

pytestmark = pytest.mark.filterwarnings(
    "ignore:Use 'content=:DeprecationWarning"
)  # raised by huggingface_hub itself


@pytest.fixture
def run(tmp_path):
    write_run(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Yield a Hub that this process and its children use, with a token for it."""
    home = tmp_path / "home"
    with loopback_hub() as hub:
        for name in list(os.environ):
            if name.startswith(("HF_", "HUGGING")):
                monkeypatch.delenv(name)
        settings = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(home),
            "HF_TOKEN_PATH": str(home / "token"),
            "HF_HUB_DISABLE_XET": True,  # Xet is another protocol instead of Git LFS
            "HF_TOKEN": hub.token,
        }
        for name, value in settings.items():
            monkeypatch.setenv(name, str(value))
            # huggingface_hub has read them at its import
            constant = name.replace("HF_ENDPOINT", "ENDPOINT")
            monkeypatch.setattr(constants, constant, value, raising=False)
        yield hub


@pytest.fixture
def push(run):
    def push(repository, *options):
        line = [str(run), "--to", "hub", "--repo", repository, *options]
        return CliRunner().invoke(export_command, line, catch_exceptions=False)

    return push


def tables_of(files):
    """Return config -> rows of the Parquet files of a repository."""
    tables = {}
    for path, contents in sorted(files.items()):
        if path.endswith(".parquet"):
            tables[path.split("/")[0]] = pq.read_table(BytesIO(contents)).to_pylist()
    return tables


def test_a_private_repository_gets_the_card_and_the_parquet_of_every_config_and_no_secret(
    hub, run, tmp_path
):
    (tmp_path / "tmp").mkdir()
    command = [ROLLTAP, "export", run, "--to", "hub", "--repo", "org/rollouts"]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert f"{hub.url}/datasets/org/rollouts" in ended.stderr
    assert hub.token not in ended.stdout + ended.stderr
    assert list((tmp_path / "tmp").iterdir()) == []
    assert hub.visible == {"org/rollouts": True}
    files = hub.files["org/rollouts"]
    tables = tables_of(files)
    assert list(tables) == ["calls", "events", "sessions", "traces"]
    assert len(files) == len(tables) + 2
    card = files["README.md"].decode()
    assert 'load_dataset("org/rollouts", "traces", split="train")' in card
    for path, contents in files.items():
        (tmp_path / "clone" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "clone" / path).write_bytes(contents)
    cache = str(tmp_path / "cache")
    traces = load_dataset(str(tmp_path / "clone"), "traces", split="train", cache_dir=cache)
    assert traces.num_rows == 4
    pushed = f"{card} {tables}"
    assert "the engine at http://ENGINE failed" in pushed
    for private in (hub.token, str(tmp_path), "/home/someone", "gpu-7.internal"):
        assert private not in pushed


def test_a_repository_is_public_only_with_the_option_and_else_a_public_one_is_refused(hub, push):
    assert push("org/open", "--public").exit_code == 0
    assert hub.visible == {"org/open": False}
    before = dict(hub.files["org/open"])
    why = "org/open exists and is public: choose another repository"
    with pytest.raises(InputError, match=why):
        push("org/open")
    assert hub.files["org/open"] == before
    assert push("org/open", "--public").exit_code == 0


def test_pushing_again_replaces_the_files_and_removes_former_shards(hub, push):
    push("org/rollouts")
    hub.files["org/rollouts"]["traces/train-00001-of-00002.parquet"] = b"of a larger run"
    hub.files["org/rollouts"]["notes.md"] = b"the user's"
    before = set(hub.files["org/rollouts"])
    push("org/rollouts")
    assert set(hub.files["org/rollouts"]) == before - {"traces/train-00001-of-00002.parquet"}


@pytest.mark.parametrize(
    ("repository", "token", "kind", "message"),
    [
        (
            "org/r",
            "",
            InputError,
            "there is no token for the Hub: log in with `hf auth login`, or set HF_TOKEN",
        ),
        ("org/r", "wrong", HubError, "refused org/r: Invalid credentials in Authorization header"),
        ("strangers/r", "hf_secret", HubError, "refused strangers/r: You don't have the rights"),
        ("a/b/c", "hf_secret", InputError, "the repository .a/b/c. is not written as ORG/NAME"),
    ],
)
def test_a_push_that_the_hub_refuses_is_a_message(
    hub, push, monkeypatch, repository, token, kind, message
):
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(kind, match=message):
        push(repository)
    assert hub.files == {}


def test_a_hub_that_cannot_be_reached_is_a_message(hub, push, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    why = r"org/r could not be pushed to the Hub at http://127.0.0.1:1: "
    with pytest.raises(HubError, match=why):
        push("org/r")


@pytest.mark.parametrize("step", ["/preupload/", "/objects/batch", "PUT /lfs/", "/commit/"])
def test_a_hub_that_refuses_in_the_middle_is_a_message_and_leaves_no_temporary_files(
    hub, push, monkeypatch, tmp_path, step
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    hub.refused = step
    with pytest.raises(HubError, match=r"org/rollouts.*\n?.*(storage limit|403)"):
        push("org/rollouts")
    assert list((tmp_path / "tmp").iterdir()) == []


def test_no_repository_is_created_for_a_folder_that_is_no_run(hub, push, run):
    (run / "run.json").unlink()
    with pytest.raises(RunError, match="is not a run folder"):
        push("org/rollouts")
    assert hub.requests == []


def test_sessions_with_what_looks_like_a_secret_are_left_out_and_named(hub, run, push, caplog):
    key = "hf_" + "k3Jx9QvT2mWz7LpB4rYd8NfH6sCg1VaExYz"
    leaking = make_call(0, [7], [8], session_id="leaks", reply=says(f"the key is {key}"))
    refused = Event(kind="refused", detail="https://me:hunter2@example.com")
    add_rows(run, leaking, make_session("leaks"), refused)
    push("org/rollouts")
    looks = "which has what looks like a secret"
    assert f"not pushed: session leaks, {looks} (token (hf_...))" in caplog.text
    assert f"not pushed: events without a session, {looks} (Password in a URL)" in caplog.text
    tables = tables_of(hub.files["org/rollouts"])
    assert {row["session_id"] for row in tables["sessions"]} == {"s", "t"}
    for rows in tables.values():
        assert {"leaks", None}.isdisjoint(row["session_id"] for row in rows)
    assert key not in str(tables)


def test_a_run_with_a_secret_in_every_session_is_not_pushed(hub, tmp_path):
    run = make_run(tmp_path / "only", make_call(0, reply=says("AKIA" + "ABCD1234" * 2)))
    line = [str(run), "--to", "hub", "--repo", "org/only"]
    with pytest.raises(InputError, match=r"every session of .* nothing is pushed"):
        CliRunner().invoke(export_command, line, catch_exceptions=False)
    assert tables_of(hub.files["org/only"]) == {}
