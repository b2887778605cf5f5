"""The engine that leads the programs, whose context window fits the longest first prompt, and what
records them."""

import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rolltap.trainer.boxes.environment import clean_environment
from rolltap.trainer.traces.reader import load_sessions
from tests.harness.play import Played, play_session, tool_call
from tests.scripted_engine import Say, ScriptedEngine

KEYS = dict.fromkeys(
    ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY", "GOOGLE_API_KEY"), "placeholder"
)


@pytest.fixture
def scripted_engine(tokenizer):
    with ScriptedEngine(tokenizer, max_model_len=200_000) as engine:
        yield engine


@pytest.fixture
def lead(scripted_engine):
    """Lead the engine by a function: the text of a prompt -> the text or `Reply` that it
    samples."""

    def lead(reply):
        def otherwise(request):
            said = reply(scripted_engine.tokenizer.decode(request["token_ids"]))
            return Say(said) if isinstance(said, str) else said

        scripted_engine.otherwise = otherwise

    return lead


@pytest.fixture
def write_twice(lead):
    """Lead the engine to write the file of the instruction in two turns, then to end. A prompt
    without tools ends.

    As models do, it says something before each call.
    """

    def reply(prompt):
        turn = prompt.count("<tool_response>") if "<tools>" in prompt else 2
        path = prompt.partition(".txt, twice")[0].rpartition("Write ")[2] + ".txt"
        if turn == 2:
            return f"<think>\nTwice.\n</think>\n\nI wrote {path}."
        call = tool_call("write_file", {"path": path, "content": f"héllo {turn}\n"})
        return call.replace("<tool_call>", f"I write {path}.\n\n<tool_call>")

    lead(reply)


@pytest.fixture
def play(scripted_engine, tokenizer_folder, tmp_path):
    """Record one session of a program on a task, with a budget and further options of the
    recorder."""

    async def play(harness, task, folder=tmp_path, **options):
        return await play_session(
            harness, task, scripted_engine, tokenizer_folder, folder, **options
        )

    return play


@pytest.fixture
def workspace(tmp_path):
    folder = tmp_path / "workspace"
    folder.mkdir()
    return folder


@pytest.fixture
def home(tmp_path):
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.fixture
def run_command(workspace, home):
    """Run a command of `rolltap` in `workspace` as users do, with a program of its own home."""

    def run_command(*command, keys):
        return subprocess.run(
            [Path(sys.executable).with_name("rolltap"), *command],
            cwd=workspace,
            env={**clean_environment(home), **keys},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    return run_command


@pytest.fixture
def record(scripted_engine, tokenizer_folder, tmp_path, run_command):
    """Record a command. A harness is given its instruction instead of the command."""

    def record(*command, harness=None, keys=KEYS):
        options = ["--out", tmp_path / "run", "--engine", scripted_engine.url]
        options += ["--model", tokenizer_folder]
        if harness is not None:
            options += ["--harness", harness.name]
            command = harness.command_for(*command)[1 + len(harness.arguments) :]
        ended = run_command("record", *options, "--", *command, keys=keys)
        assert ended.returncode in (0, 3), ended.stdout + ended.stderr  # 3: without a model call
        return Played(tmp_path / "run", ended.stdout)

    return record


@pytest.fixture
def run_rerun(scripted_engine, tmp_path, workspace, home, run_command):
    """Return a function that runs a harness again against its record, and returns the process that
    has ended.

    The workspace is emptied, and the home folder has only `files`. The engine is asked for nothing.
    """

    def run_rerun(harness, instruction, files, keys=KEYS):
        for folder in (workspace, home):
            shutil.rmtree(folder)
            folder.mkdir()
        for path, data in files.items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_bytes(data)
        (session_id,) = load_sessions(tmp_path / "run")
        asked = len(scripted_engine.asked)
        arguments = harness.command_for(instruction)[1 + len(harness.arguments) :]
        options = [tmp_path / "run", session_id, "--harness", harness.name]
        ended = run_command("rerun", *options, "--", *arguments, keys=keys)
        assert len(scripted_engine.asked) == asked
        return ended

    return run_rerun


class Pong(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"pong")

    def log_message(self, *_):
        pass


@pytest.fixture
def local_server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pong)
    threading.Thread(target=server.serve_forever).start()
    yield f"http://localhost:{server.server_port}/"
    server.shutdown()
    server.server_close()
