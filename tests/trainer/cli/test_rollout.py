"""`rolltap rollout`, `record`, `env`, `reward` and `addon`."""

import json
import os
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
from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.records import Session
from rolltap.addons.store.tables import RunWriter, read_rows
from rolltap.trainer.cli.main import rolltap as command
from rolltap.trainer.console import Watch
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.runs.verify import verify_run
from rolltap.trainer.tasks.content import content_digest
from rolltap.trainer.traces.facts import DISTRUST
from rolltap.trainer.traces.reader import RecordedCalls, load_sessions
from tests.boxes import copy_programs, imported, require_podman
from tests.deep import cases
from tests.scripted_engine import Answer, Say
from tests.trainer.cli.program import ASK, HELLO, ROLLTAP, run_rolltap
from tests.trainer.outgoing import METADATA, make_call
from tests.trainer.tasks.test_harbor import write_task


def running(marker):
    """Return the processes with `marker` on their command line."""
    processes = psutil.process_iter(["cmdline"])
    return [each for each in processes if marker in " ".join(each.info["cmdline"] or ())]


@pytest.fixture
def tasks(tmp_path):
    path = tmp_path / "tasks.jsonl"
    command = ["sh", "-c", "(cat answer.txt || echo 0) > $ROLLTAP_REWARD_FILE"]
    judge = {"kind": "command", "command": command, "result": "number"}
    path.write_text(json.dumps({"id": "t", "instruction": "Say it.", "judge": judge}))
    return path


@pytest.fixture
def preset(tmp_path):
    def preset(command):
        path = tmp_path / "harness.toml"
        program, *headless = map(json.dumps, command)
        path.write_text(
            f'name = "x"\nversion = "1"\nprogram = {program}\nheadless = [{", ".join(headless)}]\n'
        )
        return path

    return preset


def test_rollout_records_every_session_and_prints_the_summary_as_json(
    options, tmp_path, tasks, preset
):
    harness = preset(
        [sys.executable, "-c", ASK.replace("print(", "open('answer.txt', 'w').write(")]
    )
    ended = run_rolltap(
        "rollout", tasks, "--harness", harness, "-n", 3, "--recorders", 2, *options, "--json"
    )
    assert ended.returncode == 0
    summary = json.loads(ended.stdout)
    assert "tasks not tried with cheats: t: run" in ended.stderr
    assert f"the engine at {options[3]} serves {options[5]}: its base weights\n" in ended.stderr
    assert summary["sessions"] == {"failed": 3}
    assert summary["calls"] == {"completed": 3}
    assert summary["steps"][0]["mean_reward"] == 0.5
    ledger = summary["ledger"]
    assert ledger["sampled"] == ledger["trained"] > 0
    sessions = load_sessions(tmp_path / "run").values()
    assert len({session.group_id for session in sessions}) == 1
    assert {session.session_id for session in sessions} == set(RecordedCalls(tmp_path / "run"))


def test_rollout_says_which_files_of_the_judge_sessions_changed(options, tasks, preset):
    planted = ASK.replace("print(", "open('conftest.py', 'w').write(")
    ended = run_rolltap(
        "rollout", tasks, "--harness", preset([sys.executable, "-c", planted]), "-n", 2, *options
    )
    assert (
        "2 sessions changed files of the judge, which it did not take: conftest.py (2). If the task"
        in ended.stderr
    )
    assert f"next: rolltap view {options[1]}\n" in ended.stderr


ASK_OF_SYSTEM = f"""
import json, urllib.request
url, body = "https://api.openai.com/v1/chat/completions", json.dumps({HELLO!r}).encode()
reply = json.load(urllib.request.urlopen(urllib.request.Request(url, body, {{"content-type": "application/json"}})))
open("answer.txt", "w").write(reply["choices"][0]["message"]["content"])
"""
"""A program for an image that has the Python of this machine's system."""


def test_rollout_builds_the_images_of_harbor_tasks_and_a_build_that_fails_costs_its_task(
    options, tmp_path, preset
):
    require_podman()
    copy_programs(tmp_path / "base", "sh", "sleep", "cat", "cp", "mkdir")
    with imported(tmp_path / "base", ["podman"], "ENV PATH=/programs") as base:
        for name, line in (("good", "RUN echo built > /made"), ("bad", "RUN exit 3")):
            write_task(
                tmp_path / "tasks" / name,
                dockerfile=f"FROM {base}\n{line}\nCOPY . /app\nWORKDIR /app\n",
                test=(
                    "#!/bin/sh\ncat /made && cat Dockerfile && cp answer.txt"
                    " /logs/verifier/reward.txt\n"
                ),
            )
        harness = preset(["/usr/bin/python3", "-c", ASK_OF_SYSTEM])
        arguments = [
            "rollout",
            tmp_path / "tasks",
            "--harness",
            harness,
            "-n",
            2,
            *options,
            "--runtime",
            "container",
        ]
        refused = run_rolltap(*arguments)
        assert refused.returncode == 1
        assert "line 2: RUN" in refused.stderr
        assert "use --build with --runtime container" in refused.stderr
        built = run_rolltap(
            *arguments, "--build", "--container-engine", "podman", "--tools", "/usr"
        )
        assert "1 refused of 2 tasks: 1 x task 'bad'" in built.stderr
        sessions = list(load_sessions(tmp_path / "run").values())
        ends = [(session.task_id, session.status, session.reward) for session in sessions]
        assert ends == [("good", "completed", 0.5)] * 2, built.stderr
        images = {
            "localhost/rolltap-build:" + content_digest(tmp_path / "tasks" / "good" / "environment")
        }
        inspect = ["podman", "image", "inspect", "--format", "sha256:{{.Id}}", *images]
        digest = subprocess.run(inspect, capture_output=True, text=True, check=True).stdout.strip()
        assert {session.image_digest for session in sessions} == {digest}
        assert any(
            "echo built" in log.read_text()
            for log in (tmp_path / "run" / "logs").glob("build-*.log")
        )
        subprocess.run(
            ["podman", "image", "rm", "--force", *images], check=True, capture_output=True
        )


NO_CALL = ["no model call came: did the program use the proxy?", "rolltap doctor -- COMMAND"]


@pytest.mark.parametrize(
    ("command", "answered", "words"),
    cases(
        [
            ([sys.executable, "-c", ASK], 0, ["answered 500: its log says why"]),
            ([sys.executable, "-c", ASK], 1, ["answered 500: its log says why"]),
            (["true"], 0, ["(2 infrastructure)", *NO_CALL]),
        ],
        *(1, 2),
    ),
)
def test_sessions_without_a_reward_are_counted_with_what_to_try_and_all_of_them_are_status_1(
    options, scripted_engine, tasks, preset, command, answered, words
):
    scripted_engine.otherwise = None
    scripted_engine.replies.extend([Say("0.5")] * answered)
    how = ("--set", "rolltap_patience=0", "-n", 2, "--concurrency", 1, "--retries", 0)
    ended = run_rolltap("rollout", tasks, "--harness", preset(command), *options, *how)
    assert ended.returncode == (0 if answered else 1)
    assert f"{2 - answered} of 2 sessions have no reward" in ended.stderr
    assert f"  {2 - answered} of them: " in ended.stderr
    assert [each for each in words if each not in ended.stderr] == []


@pytest.mark.parametrize(
    "number", cases([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
)  # test_next has each
def test_stopping_it_leaves_no_process_and_a_readable_run(options, tmp_path, tasks, preset, number):
    marker = str(tmp_path)
    os.mkfifo(tmp_path / "started")
    harness = preset(["sh", "-c", f"sleep 600 & echo {marker} > {tmp_path}/started; wait"])
    command = [ROLLTAP, "rollout", tasks, "--harness", harness, "-n", "1", *options]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # background jobs ignore it
    )
    (tmp_path / "started").read_text()
    os.killpg(process.pid, number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert running(marker) == []
    assert list(read_rows(tmp_path / "run", "calls")) == []


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
ASK_WITH_TOOLS = ASK.replace("json={", f"json={{'tools': [{TOOL!r}], ").replace(
    "reply.json()", "reply.raise_for_status().json()"
)


@pytest.fixture
def unreadable(options, tmp_path, save_tokenizer):
    """The `options` with a model whose tool calls nothing can read."""
    template = "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"
    return [*options[:-1], save_tokenizer(tmp_path / "model", template)]


def test_a_rollout_of_a_model_whose_calls_cannot_be_read_ends_at_the_first_call_with_tools(
    unreadable, tmp_path, tasks, preset
):
    harness = preset([sys.executable, "-c", ASK_WITH_TOOLS])
    ended = run_rolltap("rollout", tasks, "--harness", harness, "-n", 4, *unreadable)
    assert ended.returncode == 2
    assert ended.stderr.count("cannot be read") == 2  # at the start, and at the end
    assert "rolltap_tool_parser: hermes, qwen-xml" in ended.stderr
    assert "Traceback" not in ended.stderr
    sessions = load_sessions(tmp_path / "run").values()
    assert {session.status for session in sessions} == {"cancelled"}
    assert any("cannot be read" in session.error for session in sessions)


def test_such_a_model_is_recorded_when_its_template_was_chosen_by_hand(
    unreadable, tmp_path, tasks, preset
):
    harness = preset([sys.executable, "-c", ASK_WITH_TOOLS])
    how = ("--set", "rolltap_renderer=default", "-n", 1)
    ended = run_rolltap("rollout", tasks, "--harness", harness, *unreadable, *how, "--json")
    assert json.loads(ended.stdout)["calls"] == {"completed": 1}


def test_record_answers_the_apis_400_to_tools_whose_calls_cannot_be_read_and_says_it(
    unreadable, tmp_path
):
    ended = run_rolltap("record", *unreadable, "--", sys.executable, "-c", ASK_WITH_TOOLS)
    assert "400 Bad Request" in ended.stderr
    assert "cannot be read" in ended.stderr.partition("the recorder listens")[0]
    (session,) = load_sessions(tmp_path / "run").values()
    assert session.status == "cancelled"
    assert "cannot be read" in session.error


def test_record_runs_a_command_and_ends_with_its_status(options, tmp_path):
    ended = run_rolltap("record", *options, "--", sys.executable, "-c", ASK)
    assert (ended.returncode, ended.stdout) == (3, "0.5\n")
    (session,) = load_sessions(tmp_path / "run").values()
    assert (session.status, session.exit_status, session.harness) == (
        "failed",
        3,
        Path(sys.executable).name,
    )
    line = ended.stderr.splitlines()[-1]
    inspect = f"rolltap inspect {tmp_path / 'run'} {session.session_id}"
    assert line == f"session {session.session_id}: failed, no reward, 1 model call. See: {inspect}"
    assert run_rolltap(*inspect.split()[1:]).returncode == 0
    assert list(RecordedCalls(tmp_path / "run")) == [session.session_id]


def test_record_starts_a_harness_by_its_preset_and_the_users_variables_win(options, tmp_path):
    show = (
        "import os, sys; print(sys.argv[1:], os.environ['WINDOW'], os.environ['KEY'], 'HTTPS_PROXY'"
        " in os.environ)"
    )
    (tmp_path / "x.toml").write_text(
        f'name = "x"\nversion = "1"\nprogram = "{sys.executable}"\narguments = ["-c", "{show}",'
        ' "--always"]\nheadless = ["{instruction}"]\n[env]\nWINDOW = "{max_model_len}"\nKEY ='
        ' "placeholder"\n'
    )
    options += ["--harness", tmp_path / "x.toml"]
    ended = run_rolltap("record", *options, "--", "-p", "go", env={**os.environ, "KEY": "mine"})
    assert (ended.returncode, ended.stdout) == (3, "['--always', '-p', 'go'] 8192 mine True\n")
    (session,) = load_sessions(tmp_path / "run").values()
    assert (session.status, session.harness) == ("completed", "x")
    assert session.preset_digest == Harness.load(str(tmp_path / "x.toml")).digest()


@pytest.mark.parametrize("preset", cases([True, False]))
def test_a_session_has_the_version_of_a_harness_and_not_of_a_plain_command(
    preset, options, tmp_path
):
    program = tmp_path / "program"
    program.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo x 1.2.3 || exec {sys.executable} -c "$@"\n'
    )
    program.chmod(0o755)
    (tmp_path / "x.toml").write_text(
        f'name = "x"\nversion = "1.2"\nprogram = "{program}"\nheadless = []\n'
    )
    command = ("--harness", tmp_path / "x.toml", "--", ASK) if preset else ("--", program, ASK)
    ended = run_rolltap("record", *options, *command)
    assert (ended.returncode, ended.stdout) == (3, "0.5\n")
    assert ("its preset was tested with 1.2" in " ".join(ended.stderr.split())) == preset
    (session,) = load_sessions(tmp_path / "run").values()
    assert session.harness_version == ("1.2.3" if preset else "")
    assert bool(session.program_digest) == preset
    assert (
        run_rolltap(
            "export", tmp_path / "run", "--to", "atif", "--out", tmp_path / "atif"
        ).returncode
        == 0
    )
    document = json.loads((tmp_path / "atif" / f"{session.session_id}.json").read_text())
    assert document["agent"]["version"] == ("1.2.3" if preset else "unknown")


GET = (
    "import httpx, ssl; httpx.get('https://api.openai.com/v1/models',"
    " verify=ssl.create_default_context())"
)
POST = "import httpx; httpx.post('https://api.example.com/v9/messages', json={'model': 'm'})"


@pytest.mark.parametrize(
    ("command", "words", "end"),
    [
        (["true"], [": completed, no reward, 0 model calls. See: rolltap inspect ", *NO_CALL], ""),
        (
            ["env", "-u", "SSL_CERT_FILE", sys.executable, "-c", GET],
            ["no model call came: api.openai.com: TLS failed"],
            DISTRUST,
        ),
        (
            [sys.executable, "-c", POST],
            ["0 model calls, 1 unanswered request to a path like that of a model call. See"],
            "POST api.example.com/v9/messages (refused: did you mean /v1/messages?)",
        ),
    ],
    ids=["no call", "distrust", "not answered"],
)
def test_record_says_why_no_model_call_was_recorded(options, command, words, end):
    ended = run_rolltap("record", *options, "--", *command)
    said = ended.stderr
    assert ended.returncode == (1 if "SSL_CERT_FILE" in command else 3)
    assert [each for each in words if each not in said] == []
    assert said.rstrip("\n").endswith(end)
    assert ("did the program use the proxy" in said) == (not end)


def test_record_says_first_that_a_program_without_a_call_failed_by_itself(options):
    ended = run_rolltap("record", *options, "--", "sh", "-c", "echo config missing; exit 5")
    assert ended.returncode == 5
    assert f"\nthe program ended with status 5: see its output; {NO_CALL[0]}" in ended.stderr


def test_record_says_where_it_listens_what_is_served_and_which_variables_it_replaces(
    options, scripted_engine, monkeypatch
):
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    scripted_engine.weight_version = "1a2b3c4d.3.0"
    served, warning, line, replaced, *_ = run_rolltap(
        "record", *options, "--", "true"
    ).stderr.splitlines()
    what = (
        f"the engine at {scripted_engine.url} serves {scripted_engine.root}: the weights"
        " 1a2b3c4d.3.0 (step 3 of"
    )
    assert served.startswith(what)
    assert "not by the base weights" in warning
    assert re.fullmatch(
        rf"the recorder listens at 127\.0\.0\.1:\d+, for the model {options[-1]}", line
    )
    assert replaced.startswith("the program does not get your ALL_PROXY")


@pytest.mark.parametrize("line", [("record",), ("rollout", "tasks.jsonl", "--harness", "x.toml")])
def test_a_model_that_is_not_found_is_named_after_the_model_that_the_engine_serves(
    line, scripted_engine, tmp_path
):
    (tmp_path / "tasks.jsonl").write_text('{"id": "a", "instruction": "go", "evaluate": ["true"]}')
    (tmp_path / "x.toml").write_text('name = "x"\nprogram = "true"\nheadless = []')
    given = "--out", tmp_path / "run", "--engine", scripted_engine.url, "--model", "mine/no name"
    command = ("--", "true") if line == ("record",) else ()
    said = run_rolltap(*line, *given, *command, cwd=tmp_path).stderr
    served, error = (
        said.index(f"serves {scripted_engine.root}"),
        said.index("there is no folder mine/no name"),
    )
    assert served < error


def record_in(folder, *arguments):
    """Run `rolltap record` in this process, and return the result."""
    return CliRunner().invoke(
        command, ["record", "--out", str(folder / "run"), *map(str, arguments), "--", "true"]
    )


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (
            "port",
            (
                r"GET http://127\.0\.0\.1:9/v1/models: no engine answers .*start it with `rolltap"
                r" serve`, or give its"
            ),
        ),
        (
            "https",
            r"GET https://\S+: no engine answers .*; it speaks no TLS: give its URL with http://",
        ),
        ("no key", r"the engine at \S+ requires a key \(401\): set ROLLTAP_ENGINE_KEY_FILE"),
        (
            "wrong key",
            r"the engine at \S+ does not accept the key \(401\): set ROLLTAP_ENGINE_KEY_FILE",
        ),
        ("another server", r"404 .*is it vLLM\? start it with `rolltap serve`"),
    ],
)
def test_a_mistake_with_the_engine_is_one_line_before_anything_is_started(
    scripted_engine, tmp_path, monkeypatch, mistake, says
):
    monkeypatch.delenv("ROLLTAP_ENGINE_KEY_FILE", raising=False)
    urls = {"port": "http://127.0.0.1:9", "https": scripted_engine.url.replace("http", "https")}
    url = urls.get(mistake, scripted_engine.url) + "/elsewhere" * (mistake == "another server")
    scripted_engine.key = "k" * 40 if "key" in mistake else None
    (tmp_path / "key").write_text("another")
    if mistake == "wrong key":
        monkeypatch.setenv("ROLLTAP_ENGINE_KEY_FILE", str(tmp_path / "key"))
    ended = record_in(tmp_path, "--engine", url, "--model", "m")
    assert isinstance(ended.exception, EngineError)
    assert re.search(says, str(ended.exception))
    assert "\n" not in str(ended.exception)
    assert (ended.output, (tmp_path / "run").exists()) == ("", False)


def test_an_engine_that_ceases_to_answer_is_told_while_the_program_runs(
    options, scripted_engine, tmp_path, monkeypatch
):
    monkeypatch.setattr("rolltap.trainer.console.ASK_SECONDS", 0.0)
    tick = Watch.tick

    def then_end(watch, now):
        tick(watch, now)
        (tmp_path / "said").touch()

    monkeypatch.setattr(Watch, "tick", then_end)
    scripted_engine.answers["/health"] = Answer(503, "")
    wait = f"until [ -e {tmp_path}/said ]; do sleep 0.01; done"
    ended = CliRunner().invoke(command, ["record", *map(str, options), "--", "sh", "-c", wait])
    said = rf"^the engine at {scripted_engine.url} has not answered for \d+ s$"
    assert re.search(said, ended.stderr, re.MULTILINE)


def test_a_model_of_another_name_at_the_engine_is_a_warning_on_stderr(options, scripted_engine):
    scripted_engine.root = "org/base-model"
    ended = run_rolltap("record", *options, "--", "true")
    assert (
        f"the recorder: the engine at {scripted_engine.url} serves org/base-model (as"
        " scripted), not" in ended.stderr
    )


@pytest.fixture
def record(options, tmp_path):
    """Return a function that records a program in a new folder and returns the end of `rolltap` and
    the session."""

    def record(*arguments, program=ASK, name="run"):
        (tmp_path / f"in-{name}").mkdir()
        run = tmp_path / name
        options[1] = run
        command = ("--", sys.executable, "-c", program)
        ended = run_rolltap("record", *options, *arguments, *command, cwd=tmp_path / f"in-{name}")
        (session,) = load_sessions(run).values()
        return ended, session

    return record


def test_an_evaluator_gives_the_session_its_reward(record, tmp_path):
    program = ASK.replace("sys.exit(3)", "open('made', 'w').close()\nsys.exit(3)")
    ended, session = record("--evaluate", "test -e made", "--task", "sort", program=program)
    assert (ended.returncode, ended.stdout) == (3, "0.5\n")
    assert (
        f"session {session.session_id}: failed, reward 1 (exit status 0 of the evaluator), 1"
        in ended.stderr
    )
    assert (session.status, session.reward, session.task_id, session.group_id) == (
        "failed",
        1.0,
        "sort",
        "sort",
    )
    assert verify_run(tmp_path / "run", lambda *_: None).verdict == "ok"


TWICE = f"exec({ASK.rpartition('sys.exit')[0]!r})\n{ASK}"


@pytest.mark.parametrize(
    ("arguments", "program", "status", "reward", "error"),
    [
        (["--evaluate", "exit 3"], ASK, "unjudged", None, "ended with status 3"),
        (["--evaluate", "touch judged"], "pass", "infrastructure", None, "no model call came"),
        (["--set", "rolltap_max_calls=1", "--evaluate", "true"], TWICE, "budget", 1.0, "budget"),
    ],
    ids=["no verdict", "not judged", "budget"],
)
def test_the_status_of_a_recorded_session_says_why_it_has_which_reward(
    record, tmp_path, monkeypatch, arguments, program, status, reward, error
):
    monkeypatch.setenv("OPENAI_BASE_URL", "http://localhost:9/v1")
    ended, session = record(*arguments, program=program)
    asked_past = (
        "asked past the recorder, and there is 'http://localhost:9/v1' in OPENAI_BASE_URL: give any"
        " other host"
    )
    assert (asked_past in ended.stderr) == (status == "infrastructure")
    assert (session.status, session.reward) == (status, reward)
    assert error in session.error
    assert status != "unjudged" or session.error in ended.stderr
    assert not (tmp_path / "in-run" / "judged").exists()


END = """
import os
answer = httpx.post("http://session.rolltap/end", json={"reward": 0.75, "task": "own"}, proxy=os.environ["HTTPS_PROXY"])
print(answer.status_code)
"""


def test_a_program_rewards_itself_only_where_that_is_accepted(record, tmp_path):
    program = ASK.replace("sys.exit(3)", END)
    ended, session = record(program=program)
    assert (ended.stdout, session.reward, session.status) == ("0.5\n403\n", None, "completed")
    ended, session = record(
        "--set", "rolltap_accept_rewards=true", program=program, name="accepting"
    )
    assert (ended.stdout, session.reward, session.revision) == ("0.5\n200\n", 0.75, 1)
    assert (session.task_id, session.status, session.exit_status) == ("own", "completed", 0)
    assert verify_run(tmp_path / "accepting", lambda *_: None).verdict == "ok"


@pytest.fixture
def secret_file(tmp_path):
    path = tmp_path / "secret"
    path.write_text("hidden\n")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("form", cases(["shell", "docker", "json"]))
def test_env_prints_what_a_program_needs_to_be_recorded(
    start, scripted_engine, secret_file, tmp_path, form
):
    mitmdump = start(f"rolltap_secret_file={secret_file}")
    scripted_engine.replies.append(Say("Hi."))
    ca = tmp_path / "conf" / "mitmproxy-ca-cert.pem"
    options = ("--session", "s 1", "--engine", scripted_engine.url, "--ca", ca, "--format", form)
    proxy = ("--proxy", f"http://{mitmdump.address}", "--secret-file", secret_file)
    printed = run_rolltap("env", *proxy, "--harness", "claude-code", *options)
    assert printed.returncode == 0
    assert "start it as: claude\n" in printed.stderr
    assert str(ca.with_name("rolltap-ca-bundle.pem")) in printed.stderr
    show = "import os; print(os.environ['CLAUDE_CODE_MAX_CONTEXT_TOKENS'])"
    command, env = [sys.executable, "-c", show + ASK], {}
    if form == "shell":
        command = ["sh", "-c", 'eval "$0"; exec "$@"', printed.stdout, *command]
    elif form == "docker":
        env = dict(line.split("=", 1) for line in printed.stdout.splitlines())
    else:
        env = json.loads(printed.stdout)
    ended = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (ended.stdout, ended.returncode) == ("8192\nHi.\n", 3), ended.stderr
    assert [call["session_id"] for call in mitmdump.rows("calls")] == ["s 1"]


@pytest.fixture
def run(tmp_path):
    """Return a run of two sessions as `rolltap env` and mitmdump leave them: with calls, without
    rows."""
    write_metadata(tmp_path / "run", METADATA)
    with RunWriter(tmp_path / "run", "never") as writer:
        for session_id in ("a", "b"):
            writer.add_call(make_call(session_id, 1, [1, 2], [3, 4]))
    return rolltap.open_run(tmp_path / "run")


def reward(run, *arguments):
    return CliRunner().invoke(command, ["reward", str(run.path), *arguments])


def test_sessions_that_rollout_did_not_start_can_be_trained_on(run):
    assert run.traces().batch().traces == []
    assert reward(run, "a", "1", "--task", "sort", "--part", "speed=0.5").exit_code == 0
    ended = reward(run, "b", "-0.5", "--task", "sort")
    assert ended.output == "b: -0.5 (task sort, group sort, revision 0)\n"
    batch = run.traces().batch()
    assert {(trace.session_id, trace.group_id, trace.reward) for trace in batch.traces} == {
        ("a", "sort", 1.0),
        ("b", "sort", -0.5),
    }
    assert batch.ledger.trained == 4
    assert run.verify(progress=False).verdict == "ok"


def test_the_newest_reward_counts_wherever_the_run_is_read(run, tmp_path):
    run.reward("a", 0.0, task="sort")
    refused = reward(run, "a", "1")
    assert refused.exit_code != 0
    assert "has the reward 0 already: replace it on purpose, with --change" in str(
        refused.exception
    )
    assert reward(run, "a", "1", "--change").exit_code == 0
    run.reward("b", 0.25, parts={"speed": 0.5})
    filtered = run.filter(tmp_path / "filtered", min_reward=1.0, progress=False)
    merged, _ = rolltap.merge_runs([run.path], tmp_path / "merged", progress=False)
    parts = run.split(tmp_path / "parts", parts=2, progress=False).values()
    for copy in (run, filtered, merged, *parts):
        assert {session.session_id: session.reward for session in copy.sessions()}.get(
            "a", 1.0
        ) == 1.0
        assert copy.verify(progress=False).verdict == "ok"
    assert [session.session_id for session in filtered.sessions()] == ["a"]


def test_the_order_of_the_files_does_not_decide(run):
    run.reward("a", 0.0)
    run.reward("a", 1.0, change=True)
    with RunWriter(run.path, "never") as writer:  # committed later
        writer.add_session(Session(session_id="b", status="failed", revision=1, reward=0.75))
        writer.add_session(Session(session_id="b", status="failed", revision=0))
    assert {session.session_id: session.reward for session in run.sessions()} == {
        "a": 1.0,
        "b": 0.75,
    }


@pytest.mark.parametrize(
    "values",
    [
        *(["nan"], ["inf"], ["-inf"], ["1e999"]),
        *(["1", "--part", part] for part in ("speed", "=1", "speed=fast", "speed=nan")),
    ],
)
def test_a_reward_or_a_part_that_is_no_finite_number_is_refused(run, values):
    assert reward(run, "a", *values).exit_code != 0
    assert run.sessions()[0].status == "unknown"


def test_a_unique_prefix_of_an_id_is_accepted_and_the_row_is_json_when_asked(run):
    with RunWriter(run.path, "never") as writer:
        for session_id in ("long-1", "long-2", "other"):
            writer.add_call(make_call(session_id, 1, [1, 2], [3, 4]))
    refused = reward(run, "long", "1")
    assert re.search(r"2 sessions of .* begin with 'long'", str(refused.exception))
    given = json.loads(reward(run, "oth", "0.5", "--part", "speed=1", "--json").output)
    assert (given["session_id"], given["reward"], given["parts"]) == ("other", 0.5, {"speed": 1.0})


def test_the_addons_path_is_a_script_that_mitmdump_can_load():
    assert "addons = " in Path(run_rolltap("addon").stdout.strip()).read_text()
