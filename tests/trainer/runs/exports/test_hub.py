import os
import subprocess
import sys
import tempfile
from io import BytesIO
from pathlib import Path

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
    with loopback_hub() as hub:
        for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING"))]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("HF_TOKEN", hub.token)
        # huggingface_hub has read these at its import: patch its constants too
        for name, value in {
            "ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_TOKEN_PATH": str(tmp_path / "home" / "token"),
            "HF_HUB_DISABLE_XET": True,  # Xet is another protocol instead of Git LFS
        }.items():
            monkeypatch.setenv(name if name.startswith("HF") else f"HF_{name}", str(value))
            monkeypatch.setattr(constants, name, value)
        yield hub


@pytest.fixture
def push(run):
    command = [str(run), "--to", "hub"]
    return lambda *options: CliRunner().invoke(
        export_command, [*command, *options], catch_exceptions=False
    )


def test_a_private_repository_gets_the_card_and_the_parquet_of_every_config_and_no_secret(
    hub, run, tmp_path
):
    (tmp_path / "tmp").mkdir()
    ended = subprocess.run(
        [
            Path(sys.executable).with_name("rolltap"),
            "export",
            run,
            "--to",
            "hub",
            "--repo",
            "org/rollouts",
        ],
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert f"{hub.url}/datasets/org/rollouts" in ended.stderr
    assert hub.token not in ended.stdout + ended.stderr
    assert list((tmp_path / "tmp").iterdir()) == []
    assert hub.visible == {"org/rollouts": True}
    files = hub.files["org/rollouts"]
    parquet = sorted(path for path in files if path.endswith(".parquet"))
    assert [path.split("/")[0] for path in parquet] == ["calls", "events", "sessions", "traces"]
    assert sorted(files) == [".gitattributes", "README.md", *parquet]
    assert 'load_dataset("org/rollouts", "traces", split="train")' in files["README.md"].decode()
    for path, contents in files.items():
        (tmp_path / "clone" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "clone" / path).write_bytes(contents)
    traces = load_dataset(
        str(tmp_path / "clone"), "traces", split="train", cache_dir=str(tmp_path / "cache")
    )
    assert traces.num_rows == 4
    rows = [pq.read_table(BytesIO(files[path])).to_pylist() for path in parquet]
    pushed = f"{files['README.md'].decode()} {rows}"
    assert "the engine at http://ENGINE failed" in pushed
    for private in (hub.token, str(tmp_path), "/home/someone", "gpu-7.internal"):
        assert private not in pushed


def test_a_repository_is_public_only_with_the_option_and_else_a_public_one_is_refused(hub, push):
    assert push("--repo", "org/open", "--public").exit_code == 0
    assert hub.visible == {"org/open": False}
    before = dict(hub.files["org/open"])
    with pytest.raises(
        InputError, match="org/open exists and is public: choose another repository"
    ):
        push("--repo", "org/open")
    assert hub.files["org/open"] == before
    assert push("--repo", "org/open", "--public").exit_code == 0


def test_pushing_again_replaces_the_files_and_removes_former_shards(hub, push):
    push("--repo", "org/rollouts")
    hub.files["org/rollouts"]["traces/train-00001-of-00002.parquet"] = b"of a larger run"
    hub.files["org/rollouts"]["notes.md"] = b"the user's"
    before = set(hub.files["org/rollouts"])
    push("--repo", "org/rollouts")
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
        push("--repo", repository)
    assert hub.files == {}


def test_a_hub_that_cannot_be_reached_is_a_message(hub, push, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(
        HubError, match=r"org/r could not be pushed to the Hub at http://127.0.0.1:1: "
    ):
        push("--repo", "org/r")


@pytest.mark.parametrize("step", ["/preupload/", "/objects/batch", "PUT /lfs/", "/commit/"])
def test_a_hub_that_refuses_in_the_middle_is_a_message_and_leaves_no_temporary_files(
    hub, push, monkeypatch, tmp_path, step
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    hub.refused = step
    with pytest.raises(HubError, match=r"org/rollouts.*\n?.*(storage limit|403)"):
        push("--repo", "org/rollouts")
    assert list((tmp_path / "tmp").iterdir()) == []


def test_no_repository_is_created_for_a_folder_that_is_no_run(hub, push, run):
    (run / "run.json").unlink()
    with pytest.raises(RunError, match="is not a run folder"):
        push("--repo", "org/rollouts")
    assert hub.requests == []


def test_sessions_with_what_looks_like_a_secret_are_left_out_and_named(hub, run, push, caplog):
    key, url = "hf_" + "k3Jx9QvT2mWz7LpB4rYd8NfH6sCg1VaExYz", "https://me:hunter2@example.com"
    add_rows(
        run,
        make_call(0, [7], [8], session_id="leaks", reply=says(f"the key is {key}")),
        make_session("leaks"),
    )
    add_rows(run, Event(kind="refused", detail=url))
    push("--repo", "org/rollouts")
    assert (
        "not pushed: session leaks, which has what looks like a secret (token (hf_...))"
        in caplog.text
    )
    assert (
        "not pushed: events without a session, which has what looks like a secret (Password in a"
        " URL)" in caplog.text
    )
    files = {
        path: content
        for path, content in hub.files["org/rollouts"].items()
        if path.endswith(".parquet")
    }
    tables = {
        path.split("/")[0]: pq.read_table(BytesIO(content)).to_pylist()
        for path, content in files.items()
    }
    assert {row["session_id"] for row in tables["sessions"]} == {"s", "t"}
    assert not {"leaks", None} & {row["session_id"] for rows in tables.values() for row in rows}
    assert key not in str(tables)


def test_a_run_with_a_secret_in_every_session_is_not_pushed(hub, tmp_path):
    run = make_run(tmp_path / "only", make_call(0, reply=says("AKIA" + "ABCD1234" * 2)))
    with pytest.raises(InputError, match=r"every session of .* nothing is pushed"):
        CliRunner().invoke(
            export_command, [str(run), "--to", "hub", "--repo", "org/only"], catch_exceptions=False
        )
    assert [path for path in hub.files["org/only"] if path.endswith(".parquet")] == []
