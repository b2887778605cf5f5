"""`rolltap record`, `env`, `reward` and `addon`."""

import json
import os
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

import rolltap
from rolltap.addons.errors import EngineError
from rolltap.addons.store.records import Session
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.cli.main import rolltap as command
from rolltap.trainer.cli.record import name_of
from rolltap.trainer.console import Watch
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.runs.verify import verify_run
from rolltap.trainer.traces.facts import DISTRUST
from rolltap.trainer.traces.reader import RecordedCalls, load_sessions
from tests.deep import cases
from tests.factories import add_rows, make_call, write_run
from tests.scripted_engine import Answer, Say
from tests.trainer.cli.program import ASK, ASK_WITH_TOOLS, NO_CALL, ROLLTAP, run_rolltap


@pytest.fixture
def record(options, tmp_path):
    """Return a function that records a program in a folder of its own. It returns the end of
    `rolltap` and the session."""

    def record(*arguments, program=ASK, name="run", env=None):
        folder = tmp_path / f"in-{name}"
        folder.mkdir()
        options[1] = tmp_path / name
        line = ["record", *options, *arguments, "--", sys.executable, "-c", program]
        ended = run_rolltap(*line, cwd=folder, env=env)
        (session,) = load_sessions(tmp_path / name).values()
        return ended, session

    return record


class TestEnd:
    """The end of `record`: its last lines, and its status."""

    def test_record_runs_a_command_and_ends_with_its_status(self, record, tmp_path):
        ended, session = record()
        assert ended.returncode == 3
        assert ended.stdout == "0.5\n"
        assert session.status == "failed"
        assert session.exit_status == 3
        assert session.harness == Path(sys.executable).name
        assert session.harness_version == session.program_digest == ""
        name = session.session_id
        inspect = ["inspect", str(tmp_path / "run"), name]
        see = f"See: rolltap {' '.join(inspect)}"
        last = ended.stderr.splitlines()[-1]
        assert last == f"session {name}: failed, no reward, 1 model call. {see}"
        assert run_rolltap(*inspect).returncode == 0
        assert list(RecordedCalls(tmp_path / "run")) == [name]

    def test_calls_that_cannot_be_read_get_the_apis_400_and_cancel_the_session(
        self, unreadable, record
    ):
        ended, session = record(program=ASK_WITH_TOOLS)
        assert "400 Bad Request" in ended.stderr
        assert "cannot be read" in ended.stderr.partition("the recorder listens")[0]
        assert session.status == "cancelled"
        assert "cannot be read" in session.error

    GET = (
        "import httpx, ssl; httpx.get('https://api.openai.com/v1/models',"
        " verify=ssl.create_default_context())"
    )
    POST = "import httpx; httpx.post('https://api.example.com/v9/messages', json={'model': 'm'})"

    @pytest.mark.parametrize(
        ("program", "status", "words", "end"),
        [
            (
                ["true"],
                3,
                [": completed, no reward, 0 model calls. See: rolltap inspect ", *NO_CALL],
                "",
            ),
            (
                ["env", "-u", "SSL_CERT_FILE", sys.executable, "-c", GET],
                1,
                ["no model call came: api.openai.com: TLS failed"],
                DISTRUST,
            ),
            (
                [sys.executable, "-c", POST],
                3,
                ["0 model calls, 1 unanswered request to a path like that of a model call. See"],
                "POST api.example.com/v9/messages (refused: did you mean /v1/messages?)",
            ),
            (
                ["sh", "-c", "exit 5"],
                5,
                [f"\nthe program ended with status 5: see its output; {NO_CALL[0]}"],
                "",
            ),
        ],
        ids=["no call", "distrust", "not answered", "failed by itself"],
    )
    def test_record_says_why_no_model_call_was_recorded(self, options, program, status, words, end):
        ended = run_rolltap("record", *options, "--", *program)
        assert ended.returncode == status
        for said in words:
            assert said in ended.stderr
        assert ended.stderr.rstrip("\n").endswith(end)
        assert ("did the program use the proxy" in ended.stderr) == (not end)

    def test_sigterm_ends_the_program_and_all_that_it_started_and_the_session_is_cancelled(
        self, options, tmp_path
    ):
        os.mkfifo(tmp_path / "started")
        deaf = (
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
            " open('started', 'w').close(); time.sleep(600)"
        )
        process = subprocess.Popen(
            [ROLLTAP, "record", *options, "--", "sh", "-c", f'{sys.executable} -c "{deaf}" & wait'],
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        (tmp_path / "started").read_text()
        below = psutil.Process(process.pid).children(recursive=True)
        running = [each for each in below if "SIG_IGN" in str(each.cmdline())]
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=120)
        assert process.returncode == 130, said
        assert len(running) == 2
        assert [each for each in running if each.is_running()] == []
        (session,) = load_sessions(tmp_path / "run").values()
        assert session.status == "cancelled"
        assert session.error == "stopped by a signal while it ran"


class TestStart:
    """The program that `record` runs, and the lines before it."""

    def test_a_harness_is_started_by_its_preset_and_the_users_variables_win(
        self, options, tmp_path
    ):
        show = (
            "import os, sys;"
            " print(sys.argv[1:], *map(os.environ.get, ('WINDOW', 'KEY')), 'HTTPS_PROXY' in os.environ)"
        )
        preset = tmp_path / "x.toml"
        preset.write_text(
            f'name = "x"\nversion = "1"\nprogram = "{sys.executable}"\n'
            f'arguments = ["-c", "{show}", "--always"]\nheadless = ["{{instruction}}"]\n'
            '[env]\nWINDOW = "{max_model_len}"\nKEY = "placeholder"\n'
        )
        line = ["record", *options, "--harness", preset, "--", "-p", "go"]
        ended = run_rolltap(*line, env={**os.environ, "KEY": "mine"})
        assert ended.returncode == 3
        assert ended.stdout == "['--always', '-p', 'go'] 8192 mine True\n"
        (session,) = load_sessions(tmp_path / "run").values()
        assert session.status == "completed"
        assert session.harness == "x"
        assert session.harness_version == platform.python_version()
        assert "its preset was tested with 1" in " ".join(ended.stderr.split())
        assert session.program_digest
        assert session.preset_digest == Harness.load(str(preset)).digest()

    def test_it_says_where_it_listens_what_is_served_and_which_variables_it_replaces(
        self, options, scripted_engine
    ):
        scripted_engine.weight_version = "1a2b3c4d.3.0"
        env = {**os.environ, "ALL_PROXY": "socks5://127.0.0.1:9"}
        ended = run_rolltap("record", *options, "--", "true", env=env)
        served, warning, listens, replaced, *_ = ended.stderr.splitlines()
        engine = f"the engine at {scripted_engine.url} serves {scripted_engine.root}"
        assert served.startswith(f"{engine}: the weights 1a2b3c4d.3.0 (step 3 of")
        assert "not by the base weights" in warning
        where = rf"the recorder listens at 127\.0\.0\.1:\d+, for the model {options[-1]}"
        assert re.fullmatch(where, listens)
        assert replaced.startswith("the program does not get your ALL_PROXY")

    def test_a_model_of_another_name_at_the_engine_is_a_warning(self, options, scripted_engine):
        scripted_engine.root = "org/base-model"
        said = run_rolltap("record", *options, "--", "true").stderr
        engine = f"the recorder: the engine at {scripted_engine.url}"
        assert f"{engine} serves org/base-model (as scripted), not" in said

    def test_the_key_file_is_given_as_an_option(self, options, scripted_engine, tmp_path):
        scripted_engine.key = "k" * 40
        key = tmp_path / "engine.key"
        key.write_text(scripted_engine.key)
        ask = 'import httpx; print(httpx.get("https://api.openai.com/v1/models").json()["data"])'
        env = dict(os.environ)
        env.pop("ROLLTAP_ENGINE_KEY_FILE", None)
        line = ["record", *options, "--engine-key-file", key, "--", sys.executable, "-c", ask]
        assert "'id': 'scripted'" in run_rolltap(*line, env=env).stdout

    def test_a_model_that_is_not_found_is_named_after_the_model_that_the_engine_serves(
        self, options, scripted_engine
    ):
        options[-1] = "mine/no name"
        said = run_rolltap("record", *options, "--", "true").stderr
        _, served, error = said.partition(f"serves {scripted_engine.root}")
        assert served
        assert "there is no folder mine/no name" in error

    @pytest.mark.parametrize(
        ("url", "key", "says"),
        [
            ("http://127.0.0.1:9", None, r"/v1/models: no engine answers .*`rolltap serve`"),
            (
                "https{}",
                None,
                r"GET https://\S+: no engine answers .* no TLS: give its URL with ht",
            ),
            ("http{}", "k" * 40, r"requires a key \(401\): set ROLLTAP_ENGINE_KEY_FILE"),
            ("http{}/elsewhere", None, r"404 .*is it vLLM\? start it with `rolltap serve`"),
        ],
        ids=["port", "https", "key", "another server"],
    )
    def test_a_mistake_with_the_engine_is_one_line_before_anything_is_started(
        self, scripted_engine, tmp_path, monkeypatch, url, key, says
    ):
        monkeypatch.delenv("ROLLTAP_ENGINE_KEY_FILE", raising=False)
        scripted_engine.key = key
        url = url.format(scripted_engine.url.removeprefix("http"))
        run = tmp_path / "run"
        line = ["record", "--out", str(run), "--engine", url, "--model", "m", "--", "true"]
        ended = CliRunner().invoke(command, line)
        assert isinstance(ended.exception, EngineError)
        assert re.search(says, str(ended.exception))
        assert "\n" not in str(ended.exception)
        assert ended.output == ""
        assert not run.exists()

    def test_an_engine_that_ceases_to_answer_is_told_while_the_program_runs(
        self, options, scripted_engine, tmp_path, monkeypatch
    ):
        tick = Watch.tick

        def then_end(watch, now):
            tick(watch, now)
            (tmp_path / "said").touch()

        monkeypatch.setattr("rolltap.trainer.console.ASK_SECONDS", 0.0)
        monkeypatch.setattr(Watch, "tick", then_end)
        scripted_engine.answers["/health"] = Answer(503, "")
        wait = f"until [ -e {tmp_path}/said ]; do sleep 0.01; done"
        line = ["record", *map(str, options), "--", "sh", "-c", wait]
        said = rf"^the engine at {scripted_engine.url} has not answered for \d+ s$"
        assert re.search(said, CliRunner().invoke(command, line).stderr, re.MULTILINE)

    @pytest.mark.parametrize(
        ("line", "name"),
        [
            ("true", "true"),
            ("/bin/sh scripts/go.sh", "go.sh"),
            ("uv run --with httpx agent.py scripts/go.sh", "agent.py"),
            ("python3 -u -m agent", "agent"),
            ("python3 -m package.inner -v", "package.inner"),
            ("python3 -m json.tool --help", "python3"),
            (f"/usr/bin/python3 -c {'pass;' * 300}", "python3"),
            ("/", "/"),
        ],
    )
    def test_a_session_has_the_name_of_the_script_that_a_command_runs(
        self, tmp_path, monkeypatch, line, name
    ):
        monkeypatch.chdir(tmp_path)
        for file in ("scripts/go.sh", "agent.py", "package/inner/__main__.py"):
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).touch()
        assert name_of(line.split()) == name


TWICE = f"exec({ASK.rpartition('sys.exit')[0]!r})\n{ASK}"
REWARDED = """
import os
answer = httpx.post(
    "http://session.rolltap/end",
    json={"reward": 0.75, "task": "own"},
    proxy=os.environ["HTTPS_PROXY"],
)
print(answer.status_code)
"""


class TestEvaluate:
    """Sessions that are judged as they are recorded."""

    def test_the_evaluator_is_a_line_of_a_shell_and_its_status_is_the_reward(self, record):
        program = f"import os; os.mkdir('made'){ASK}"
        line = ["--evaluate", "true && cd made && false", "--task", "sort", "--json"]
        ended, session = record(*line, program=program)
        assert ended.returncode == 3
        assert session.status == "failed"
        assert session.reward == 0.0
        assert session.task_id == "sort"
        assert session.group_id == "sort"
        assert "reward 0 (exit status 1 of the evaluator), 1 model call" in ended.stderr
        written = json.loads(ended.stdout)  # the program's own output is on stderr
        assert written["session_id"] == session.session_id
        assert written["reward"] == 0.0
        assert written["calls"] == 1
        assert written["sampled_tokens"] == 4
        assert verify_run(Path(written["run"]), lambda *_: None).verdict == "ok"

    def test_an_evaluator_that_cannot_run_is_refused_before_the_program_starts(
        self, options, tmp_path
    ):
        line = ["record", *options, "--evaluate", "no-such-judge -q", "--", "touch", "started"]
        ended = run_rolltap(*line, cwd=tmp_path)
        assert ended.returncode == 1
        assert ended.stderr.startswith("error: the evaluator 'no-such-judge -q' needs 'no-such-ju")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("line", "program", "status", "reward", "error"),
        [
            ("--evaluate;exit 3", ASK, "unjudged", None, "ended with status 3"),
            ("--evaluate;touch judged", "", "infrastructure", None, "no model call came"),
            ("--evaluate;true;--set;rolltap_max_calls=1", TWICE, "budget", 1.0, "budget"),
        ],
        ids=["no verdict", "not judged", "budget"],
    )
    def test_the_status_of_a_recorded_session_says_why_it_has_which_reward(
        self, record, tmp_path, line, program, status, reward, error
    ):
        env = {**os.environ, "OPENAI_BASE_URL": "http://localhost:9/v1"}
        ended, session = record(*line.split(";"), program=program, env=env)
        asked_past = "asked past the recorder, and there is 'http://localhost:9/v1' in OPENAI_BASE_"
        assert (asked_past in ended.stderr) == (status == "infrastructure")
        assert session.status == status
        assert session.reward == reward
        assert error in session.error
        assert status != "unjudged" or session.error in ended.stderr
        assert not (tmp_path / "in-run" / "judged").exists()

    def test_a_program_rewards_itself_only_where_that_is_accepted(self, record, tmp_path):
        program = ASK.replace("sys.exit(3)", REWARDED)
        ended, session = record(program=program)
        assert ended.stdout == "0.5\n403\n"
        assert session.status == "completed"
        assert session.reward is None
        accepts = ["--set", "rolltap_accept_rewards=true"]
        ended, session = record(*accepts, program=program, name="accepting")
        assert ended.stdout == "0.5\n200\n"
        assert session.status == "completed"
        assert session.reward == 0.75
        assert session.revision == 1
        assert session.task_id == "own"
        assert session.exit_status == 0
        assert verify_run(tmp_path / "accepting", lambda *_: None).verdict == "ok"


@pytest.mark.parametrize("form", cases(["shell", "docker", "json"]))
def test_env_prints_what_a_program_needs_to_be_recorded(start, scripted_engine, tmp_path, form):
    secret = tmp_path / "secret"
    secret.write_text("hidden\n")
    secret.chmod(0o600)
    mitmdump = start(f"rolltap_secret_file={secret}")
    scripted_engine.replies.append(Say("Hi."))
    ca = tmp_path / "conf" / "mitmproxy-ca-cert.pem"
    line = ["env", "--proxy", f"http://{mitmdump.address}", "--secret-file", secret, "--ca", ca]
    line += ["--harness", "claude-code", "--engine", scripted_engine.url]
    printed = run_rolltap(*line, "--session", "s 1", "--format", form)
    assert printed.returncode == 0
    assert "start it as: claude\n" in printed.stderr
    assert str(ca.with_name("rolltap-ca-bundle.pem")) in printed.stderr
    show = "import os; print(os.environ['CLAUDE_CODE_MAX_CONTEXT_TOKENS'])"
    program = [sys.executable, "-c", show + ASK]
    env = {}
    if form == "shell":
        program = ["sh", "-c", 'eval "$0"; exec "$@"', printed.stdout, *program]
    elif form == "docker":
        env = dict(line.split("=", 1) for line in printed.stdout.splitlines())
    else:
        env = json.loads(printed.stdout)
    ended = subprocess.run(program, env=env, capture_output=True, text=True)
    assert ended.stdout == "8192\nHi.\n", ended.stderr
    assert [call["session_id"] for call in mitmdump.rows("calls")] == ["s 1"]


def test_the_addons_path_is_a_script_that_mitmdump_can_load():
    assert "addons = " in Path(run_rolltap("addon").stdout.strip()).read_text()


class TestReward:
    @pytest.fixture
    def run(self, tmp_path):
        """Return a run of two sessions as `rolltap env` and mitmdump leave them: with calls,
        without rows."""
        calls = [make_call("a", session_id="a"), make_call("b", session_id="b")]
        return rolltap.open_run(write_run(tmp_path / "run", *calls))

    @pytest.fixture
    def reward(self, run):
        def reward(*arguments):
            return CliRunner().invoke(command, ["reward", str(run.path), *arguments])

        return reward

    def test_sessions_that_rollout_did_not_start_can_be_trained_on(self, run, reward):
        assert run.traces().batch().traces == []
        assert reward("a", "1", "--task", "sort", "--part", "speed=0.5").exit_code == 0
        ended = reward("b", "-0.5", "--task", "sort")
        assert ended.output == "b: -0.5 (task sort, group sort, revision 0)\n"
        batch = run.traces().batch()
        assert {trace.session_id: trace.reward for trace in batch.traces} == {"a": 1.0, "b": -0.5}
        assert {trace.group_id for trace in batch.traces} == {"sort"}
        assert batch.ledger.trained == 2
        assert run.verify(progress=False).verdict == "ok"

    def test_the_newest_reward_counts_wherever_the_run_is_read(self, run, reward, tmp_path):
        run.reward("a", 0.0, task="sort")
        refused = reward("a", "1")
        assert "has the reward 0 already: replace it on purpose, with --change" in str(
            refused.exception
        )
        assert reward("a", "1", "--change").exit_code == 0
        run.reward("b", 0.25, parts={"speed": 0.5})
        filtered = run.filter(tmp_path / "filtered", min_reward=1.0, progress=False)
        merged, _ = rolltap.merge_runs([run.path], tmp_path / "merged", progress=False)
        parts = run.split(tmp_path / "parts", parts=2, progress=False).values()
        for copy in (run, filtered, merged, *parts):
            for session in copy.sessions():
                assert session.reward == {"a": 1.0, "b": 0.25}[session.session_id]
            assert copy.verify(progress=False).verdict == "ok"
        assert [session.session_id for session in filtered.sessions()] == ["a"]

    def test_the_order_of_the_files_does_not_decide(self, run):
        later = Session(session_id="b", status="failed", revision=1, reward=0.75)
        with RunWriter(run.path, "never") as writer:
            writer.add_session(later)
            writer.add_session(Session(session_id="b", status="failed", revision=0))
        rewards = {session.session_id: session.reward for session in run.sessions()}
        assert rewards == {"a": None, "b": 0.75}

    @pytest.mark.parametrize(
        "value", ["nan", "1e999", *(f"1 --part {part}" for part in ("s", "=1", "s=fast", "s=nan"))]
    )
    def test_a_reward_or_a_part_that_is_no_finite_number_is_refused(self, run, reward, value):
        assert reward("a", *value.split()).exit_code != 0
        assert run.sessions()[0].status == "unknown"

    def test_a_unique_prefix_of_an_id_is_accepted_and_the_row_is_json_when_asked(self, run, reward):
        ids = ("long-1", "long-2", "other")
        add_rows(run.path, *(make_call(name, session_id=name) for name in ids))
        refused = reward("long", "1")
        assert re.search(r"2 sessions of .* begin with 'long'", str(refused.exception))
        given = json.loads(reward("oth", "0.5", "--part", "speed=1", "--json").output)
        assert given["session_id"] == "other"
        assert given["reward"] == 0.5
        assert given["parts"] == {"speed": 1.0}
