import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.tasks.sources import load_tasks
from rolltap.trainer.tasks.task import Build

TEST = "#!/bin/bash\nmkdir -p /logs/verifier\necho 1 > /logs/verifier/reward.txt\n"
DOCKERFILE = (
    "FROM ubuntu:24.04\n\n# Install or copy over any environment dependencies here.\n\nWORKDIR /app"
)


def write_task(folder, *, toml="", dockerfile=DOCKERFILE, test=TEST, instruction="Do it.\n"):
    files = {
        "task.toml": toml,
        "instruction.md": instruction,
        "environment/Dockerfile": dockerfile,
        "tests/test.sh": test,
        "solution/solve.sh": "echo SECRET",
    }
    for name, text in files.items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder


def load(folder, **parts):
    (task,) = load_tasks(write_task(folder / "task", **parts))
    return task


def test_a_task_folder_becomes_a_task(tmp_path):
    toml = """
        schema_version = "1.4"
        task = { name = "org/name", authors = [{ name = "A", email = "a@example.org" }] }
        metadata = { difficulty = "easy", anything = [1, 2] }
        agent = { timeout_sec = 900.0 }
        verifier = { timeout_sec = 120.0, env = { MODEL = "x" } }
        solution = { env = { ANSWER = "SECRET" } }
        [environment]
        build_timeout_sec = 600.0
        cpus = 2
        memory_mb = 2048
        storage_mb = 512
        gpus = 0
        network_mode = "no-network"
    """
    task = load(tmp_path, toml=toml)
    assert (task.id, task.instruction, task.timeout) == ("task", "Do it.", 900.0)
    assert (task.workdir, task.files, task.needs_network) == ("/app", {}, None)
    assert (task.image, task.image_optional) == ("ubuntu:24.04", True)
    assert (task.limits.cpus, task.limits.memory_gib, task.limits.disk_gib) == (2, 2, 0.5)
    assert (task.source, task.solution) == (str(tmp_path / "task"), tmp_path / "task" / "solution")
    judge = task.effective_judge
    assert judge.command == ["/bin/bash", "/tests/test.sh"]
    assert (judge.timeout, judge.env, judge.paths) == (120.0, {"MODEL": "x"}, None)
    assert judge.mounts == {"/tests": tmp_path / "task" / "tests"}
    assert judge.reward_files == ["/logs/verifier/reward.txt", "/logs/verifier/reward.json"]
    assert judge.writable == ["/logs/verifier"]
    assert "SECRET" not in task.model_dump_json()


def test_the_agents_program_is_run_before_the_judge_where_the_metadata_say_so(tmp_path):
    metadata = "[metadata]\ndifficulty = 'easy'\n[metadata.rolltap]\n"
    task = load(tmp_path, toml=metadata + "run = ['sh', '-c', 'python3 main.py > out.txt']")
    assert task.effective_judge.run == ["sh", "-c", "python3 main.py > out.txt"]
    with pytest.raises(InputError, match=r"metadata\.rolltap\.runs"):
        load(tmp_path, toml=metadata + "runs = ['true']")


def test_a_folder_of_tasks_is_read_by_name_without_those_that_are_refused(tmp_path, caplog):
    for name in ("b", "a"):
        write_task(tmp_path / name)
    write_task(tmp_path / "c", toml="[environment]\ngpus = 1")
    (tmp_path / "README.md").touch()
    (tmp_path / "other").mkdir()
    assert [task.id for task in load_tasks(tmp_path)] == ["a", "b"]
    assert "1 refused of 3 tasks: 1 x" in caplog.text
    refused = []
    (tmp_path / "c" / "task.toml").unlink()
    (tmp_path / "b" / "tests" / "test.sh").unlink()
    assert [task.id for task in load_tasks(tmp_path, refused=refused)] == ["a"]
    assert refused == [f"{tmp_path / 'b'}: tests/test.sh is missing: it judges the task"]
    with pytest.raises(InputError, match="other has no tasks: give a Harbor task folder"):
        load_tasks(tmp_path / "other")


def test_every_missing_part_of_a_folder_is_named_at_once(tmp_path):
    nothing = {"dockerfile": None, "test": None, "instruction": None}
    with pytest.raises(InputError) as error:
        load(tmp_path, toml="[environment]\ngpus = 1\ntpu = 'x'", **nothing)
    keys = "'environment.gpus' = 1, 'environment.tpu' = x"
    for part in (keys, "instruction.md", "tests/test.sh", "Dockerfile"):
        assert part in str(error.value)


def test_files_that_the_dockerfile_copies_are_in_the_workspace(tmp_path):
    environment = tmp_path / "task" / "environment"
    (environment / "data").mkdir(parents=True)
    (environment / "one.txt").touch()
    text = "FROM python:3.13-slim\nWORKDIR /app\nENV A=1\nCOPY data /app/data\nCOPY one.txt ./\n"
    task = load(tmp_path, dockerfile=text)
    assert (task.workdir, task.env, task.image_optional) == ("/app", {"A": "1"}, True)
    assert task.files == {"data": environment / "data", "one.txt": environment / "one.txt"}
    special = load(tmp_path, dockerfile=text.replace("python:3.13-slim", "me/special"))
    assert special.image_optional is False


def test_an_image_without_dockerfile_gets_the_environment_folder(tmp_path):
    toml = '[environment]\ndocker_image = "python:3.13-slim"\nworkdir = "/data"\n'
    write_task(tmp_path / "task", toml=toml, dockerfile=None)
    (tmp_path / "task" / "environment").mkdir()
    (task,) = load_tasks(tmp_path / "task")
    assert (task.image, task.image_optional) == ("python:3.13-slim", True)
    assert (task.workdir, task.files) == ("/data", {})
    (tmp_path / "task" / "environment" / "a").touch()
    (task,) = load_tasks(tmp_path / "task")
    assert task.files == {".": tmp_path / "task" / "environment"}
    built = '[environment]\ndocker_image = "me/built"'  # an image that was built is needed
    task = load(tmp_path, toml=built, dockerfile="FROM ubuntu\nRUN make\nWORKDIR /x")
    assert (task.image, task.image_optional, task.workdir) == ("me/built", False, "/x")


@pytest.mark.parametrize(
    ("dockerfile", "why"),
    [
        ("FROM ubuntu\nRUN make\nWORKDIR /x", "line 2: RUN make"),
        ("FROM ubuntu\nWORKDIR /x\nCOPY . /etc/x", "COPY to /etc/x, outside the work folder /x"),
    ],
)
def test_an_image_that_must_be_built_is_made_of_the_environment_folder_alone(
    tmp_path, dockerfile, why
):
    task = load(tmp_path, dockerfile=dockerfile, toml="[environment]\nbuild_timeout_sec = 90.0")
    assert task.build == Build(folder=tmp_path / "task" / "environment", timeout=90, why=why)
    assert (task.image, task.image_optional, task.files, task.workdir) == (None, False, {}, "/x")


def test_without_a_dockerfile_and_an_image_both_are_named(tmp_path):
    with pytest.raises(
        InputError, match=r"give environment/Dockerfile, or 'environment\.docker_image'"
    ):
        load(tmp_path, dockerfile=None)


def test_a_separate_verifier_gets_the_artifacts_only(tmp_path):
    toml = (
        'artifacts = ["out.json", { source = "/app/sub/x" }]\n[verifier]\nenvironment_mode ='
        ' "separate"'
    )
    separate = load(tmp_path, toml=toml).effective_judge
    assert separate.paths == ["out.json", "out.json/**", "sub/x", "sub/x/**"]
    with pytest.raises(InputError, match=r"the artifact /var/x is outside the work folder /app"):
        load(tmp_path, toml='artifacts = ["/var/x"]\n[verifier]\nenvironment_mode = "separate"')
    assert load(tmp_path, toml='artifacts = ["/var/x"]').effective_judge.paths is None


def test_variables_come_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKEN", "t")
    toml = '[environment.env]\nA = "${TOKEN}"\nB = "${UNSET_ONE:-b}"\nC = "plain $x"\n'
    assert load(tmp_path, toml=toml).env == {"A": "t", "B": "b", "C": "plain $x"}
    with pytest.raises(
        InputError, match=r"task\.toml: the variable A needs \$\{UNSET_ONE\}, which is not set"
    ):
        load(tmp_path, toml='[verifier.env]\nA = "${UNSET_ONE}"\n')


def test_older_sizes_are_read(tmp_path):
    sizes = 'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "512M"\n'
    limits = load(tmp_path, toml=sizes).limits
    assert (limits.memory_gib, limits.disk_gib) == (2, 0.5)


def test_a_canary_is_not_shown_and_the_name_must_be_an_id(tmp_path):
    canary = "<!-- harbor-canary GUID x -->\n# canary y\n\n# Title\nDo it.\n"
    assert load(tmp_path, instruction=canary).instruction == "# Title\nDo it."
    with pytest.raises(InputError, match="with space: 'id' is 'with space'"):
        load_tasks(write_task(tmp_path / "with space"))


ALLOWLIST = 'network_mode = "allowlist"\nallowed_hosts = ["a.org", "*.b.org", "::1"]'
ALLOWED = ["a.org:*", "*.b.org:*", "[::1]:*"]
PUBLIC = 'network_mode = "public"'
NONE = 'network_mode = "no-network"'
ALL = ["*:*"]


@pytest.mark.parametrize(
    ("toml", "agents", "judges"),
    [
        ("", None, []),
        (f"[environment]\n{PUBLIC}", ALL, ALL),
        (f"[environment]\n{NONE}", [], []),
        (f"[environment]\n{ALLOWLIST}", ALLOWED, ALLOWED),
        (f"[agent]\n{ALLOWLIST}", ALLOWED, []),
        (f"[environment]\n{NONE}\n[verifier]\n{PUBLIC}", [], ALL),
        (f"[environment]\n{PUBLIC}\n[verifier]\n{NONE}", ALL, []),
        ("[environment]\nallow_internet = true", ALL, ALL),
        ("[environment]\nallow_internet = false", [], []),
        (f"[environment]\nallow_internet = true\n{NONE}", [], []),
    ],
)
def test_network_policies_are_the_hosts_of_the_session_and_of_its_judge(
    tmp_path, toml, agents, judges
):
    task = load(tmp_path, toml=toml)
    assert (task.allow, task.effective_judge.allow, task.needs_network) == (agents, judges, None)


RANGE = '[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = ["10.0.0.0/8"]'


@pytest.mark.parametrize(
    ("toml", "why"),
    [
        ('[agent]\nallowed_hosts = ["a.org"]', "'allowed_hosts' needs 'network_mode' = \"allow"),
        (RANGE, "no ranges of addresses"),
    ],
)
def test_a_network_policy_that_cannot_be_had_is_refused(tmp_path, toml, why):
    with pytest.raises(InputError, match=why):
        load(tmp_path, toml=toml)


DOWNLOADS = [
    "apt-get update",
    "curl -LsSf https://x > x",
    "if uvx pytest; then",
    "pip install pytest",
    "python -m pip install x",
]


@pytest.mark.parametrize("line", DOWNLOADS)
def test_tests_that_download_need_a_network(tmp_path, line):
    task = load(tmp_path, test=f"#!/bin/bash\n# apt-get is not here\n{line}\n")
    assert task.needs_network == f"{tmp_path / 'task' / 'tests' / 'test.sh'}, line 3: {line}"
    public = load(tmp_path, test=f"#!/bin/bash\n\n{line}\n", toml=f"[verifier]\n{PUBLIC}")
    assert public.needs_network is None


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('[[steps]]\nname = "one"', r"task\.toml: rolltap cannot have 'steps' = "),
        ("[environment]\ngpus = 1", r"rolltap cannot have 'environment\.gpus' = 1: remove it"),
        ('[environment]\nos = "windows"', r"'environment\.os' = windows"),
        (
            '[[environment.mcp_servers]]\nname = "x"\nurl = "http://x"',
            r"'environment\.mcp_servers' = ",
        ),
        ('[environment]\nskills_dir = "/skills"', r"'environment\.skills_dir' = /skills"),
        ('[environment.healthcheck]\ncommand = "true"', r"'environment\.healthcheck' = "),
        ('[environment.tpu]\ntype = "v6e"\ntopology = "2x2"', r"'environment\.tpu' = "),
        ('[agent]\nuser = "agent"', r"'agent\.user' = agent"),
        ("[verifier]\nuser = 1000", r"'verifier\.user' = 1000"),
        ('[verifier.environment]\ndocker_image = "x"', r"'verifier\.environment' = "),
        ('[verifier]\nenvironment_mode = "shared"', r"'verifier\.environment_mode' = shared"),
        ('[[verifier.collect]]\ncommand = "x"', r"'verifier\.collect' = "),
        ("[agent]\ntimeout = 3", r"task\.toml: unknown key 'agent\.timeout'"),
        ("[environment]\ncpus = -1", r"'environment\.cpus' is -1"),
        ('[environment]\nmemory = "2 apples"', r"'environment\.memory' is '2 apples'"),
        ("x", r"task\.toml is not TOML"),
    ],
)
def test_what_rolltap_does_not_have_is_refused_by_its_key(tmp_path, toml, message):
    with pytest.raises(InputError, match=message):
        load(tmp_path, toml=toml)


SEPARATE = '[verifier]\nenvironment_mode = "separate"'


@pytest.mark.parametrize(
    ("name", "toml"),
    [
        ("environment/docker-compose.yaml", ""),
        ("trajectory.json", ""),
        ("tests/Dockerfile", SEPARATE),
    ],
)
def test_files_that_rolltap_cannot_use_are_refused(tmp_path, name, toml):
    folder = write_task(tmp_path / "task", toml=toml)
    (folder / name).touch()
    with pytest.raises(InputError, match=f"{name}: rolltap cannot use it"):
        load_tasks(folder)
