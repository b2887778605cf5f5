from pathlib import Path

import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.training.recipe import load_recipe

GOOD = 'model = "m"\ntasks = "t.jsonl"\nharness = "h.toml"\nsteps = 1\n'
HELD_OUT = '[evaluation]\ntasks = "h.jsonl"\n'


@pytest.fixture
def load(tmp_path):
    """A function: text of a recipe -> the recipe."""

    def load(text):
        (tmp_path / "r.toml").write_text(text)
        return load_recipe(tmp_path / "r.toml")

    return load


def test_paths_are_relative_to_the_recipe_or_absolute(load, tmp_path):
    recipe = load(
        GOOD
        + 'publish_folder = "way"\nruntime = "sandbox"\ntools = ["b", "/o"]\nrepositories = "r"\n'
    )
    assert recipe.model == tmp_path / "m"
    assert recipe.tasks == tmp_path / "t.jsonl"
    assert recipe.repositories == tmp_path / "r"
    assert recipe.harness == str(tmp_path / "h.toml")
    assert recipe.tools == (tmp_path / "b", Path("/o"))
    assert recipe.publish_folder == tmp_path / "way"
    assert load(GOOD + 'publish_folder = "/dev/shm"\n').publish_folder == Path("/dev/shm")


def test_programs_and_files_of_a_runtime_are_relative_to_the_recipe(load, tmp_path):
    (tmp_path / "venv").symlink_to("/usr")
    harbor = GOOD + 'runtime = "harbor"\n'
    there = load(harbor + 'harbor_python = "venv/python"\nharbor_environment = "e.json"\n')
    assert there.harbor_python == f"{tmp_path}/venv/python"
    assert there.harbor_environment == f"{tmp_path}/e.json"
    named = load(harbor + 'harbor_python = "python3"\nharbor_environment = "daytona"\n')
    assert (named.harbor_python, named.harbor_environment) == ("python3", "daytona")
    behind_ssh = load(GOOD + f'runtime = "ssh"\nssh = "machine"\ntools = ["{tmp_path}/venv"]\n')
    assert behind_ssh.tools == (tmp_path / "venv",)


def test_so_many_adapters_stay_loaded_that_sessions_ahead_keep_theirs(load):
    adapted = f'{GOOD}publish = "lora"\n'
    lora = "[lora]\nr = 1\n"
    for max_staleness, adapters in {0: 4, 1: 4, 2: 4, 3: 5, 7: 9}.items():
        recipe = load(f"{adapted}max_staleness = {max_staleness}\n{lora}")
        assert recipe.adapters == adapters
    assert load(f"{adapted}max_staleness = 1\nadapters = 3\n{lora}").adapters == 3
    message = "adapters = 4 with max_staleness = 3: give at least 5, or remove it"
    with pytest.raises(InputError, match=message):
        load(f"{adapted}max_staleness = 3\nadapters = 4\n{lora}")


def test_a_session_keeps_its_adapter_unless_the_recorder_is_told_otherwise(load):
    lora = "[lora]\nr = 1\n"
    assert load(f'{GOOD}publish = "lora"\n{lora}').keeps_adapters
    assert not load(
        f'{GOOD}publish = "lora"\n{lora}[recorder]\nrolltap_keep_adapter = "false"\n'
    ).keeps_adapters
    assert not load(GOOD).keeps_adapters


def test_held_out_tasks_are_relative_to_the_recipe_and_sampled_at_temperature_0(load, tmp_path):
    held_out = load(GOOD + HELD_OUT).evaluation
    assert held_out.tasks == tmp_path / "h.jsonl"
    assert held_out.sampling == {"temperature": 0.0}
    assert load(GOOD + '[evaluation]\ntasks = "/h"\nsampling = {}\n').evaluation.sampling == {}
    assert load(GOOD).evaluation is None


def test_a_harness_may_be_a_name(load):
    assert load(GOOD.replace("h.toml", "codex")).harness == "codex"


def test_calls_to_train_are_chosen_by_role_and_length(load):
    recipe = load(GOOD + 'strategy = "tree"\nroles = ["agent", "auxiliary"]\nmax_tokens = 4096\n')
    assert (recipe.strategy, recipe.roles, recipe.max_tokens) == (
        "tree",
        ("agent", "auxiliary"),
        4096,
    )
    recipe = load(GOOD)
    assert (recipe.roles, recipe.max_tokens) == (("agent", "subagent", "compaction"), None)


def test_outcomes_suspicions_and_budgets_become_rules_and_options(load):
    recipe = load(
        GOOD
        + 'suspicious = 0.5\n[outcomes]\ntimeout = 0\nfailed = "exclude"\n[budget]\ncalls = 40\n'
    )
    rules = recipe.trace_options().rewards
    assert (rules.suspicious, rules.outcomes.timeout, rules.outcomes.failed) == (0.5, 0, "exclude")
    assert (rules.outcomes.budget, rules.outcomes.unjudged) == ("judge", "exclude")
    assert recipe.budget.options() == {"rolltap_max_calls": "40"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + 'suspicious = "maybe"\n', "'suspicious"),
        (GOOD + "suspicious = true\n", "'suspicious"),
        (GOOD + '[outcomes]\ntimeout = "zero"\n', r"'outcomes\.timeout"),
        (GOOD + '[outcomes]\nunjudged = "judge"\n', r"'outcomes\.unjudged"),
        (GOOD + "[outcomes]\ninfrastructure = 0\n", r"outcomes\.infrastructure"),
        (GOOD + 'runtime = "vm"\n', "'runtime' is 'vm'"),
        (GOOD + 'container_engine = "docker"\n', 'are for runtime = "container", not "process"'),
        (GOOD + "retries = -1\n", "'retries' is -1"),
        (GOOD + "[budget]\ncalls = 0\n", r"'budget\.calls' is 0"),
        (
            GOOD + '[recorder]\nrolltap_max_calls = "3"\n',
            r"set budget\.calls .* instead of rolltap_max_calls",
        ),
        (
            GOOD + '[recorder]\nrolltap_samplin = "{}"\n',
            r"recorder\.rolltap_samplin is .* did you mean rolltap_sampling",
        ),
        (GOOD + '[recorder]\nrolltap_patience = "abc"\n', r"recorder\.rolltap_patience is 'abc'"),
        ("model = ", "is not TOML"),
        (GOOD + "stepz = 3\n", "unknown key 'stepz'"),
        (GOOD.replace("steps = 1", "steps = 0"), "'steps' is 0"),
        (
            GOOD + 'strategy = "merge"\n',
            "'strategy' is 'merge': Input should be 'per_request', .* or 'tree'",
        ),
        (
            GOOD + 'roles = ["agent", "agnet"]\n',
            r"'roles\.1' is 'agnet': Input should be 'agent', .*or 'auxiliary'",
        ),
        (GOOD + "roles = []\n", r"'roles' is \[\]"),
        (GOOD + "recorders = 0\n", "'recorders' is 0"),
        (GOOD + "max_tokens = 0\n", "'max_tokens' is 0"),
        (GOOD + 'publish = "lora"\n', r"needs a \[lora\] table"),
        (GOOD + "adapters = 2\n", 'adapters does nothing with publish = "checkpoint": remove it'),
        (
            GOOD + 'teacher_engine = "http://h"\n',
            "teacher_engine does nothing without teacher: add teacher",
        ),
        (
            GOOD + 'teacher = "x"\nteacher_engine = "http://h"\n[forks]\nsessions = 2\n',
            "with a teacher all groups train: remove forks",
        ),
        (
            GOOD + 'dtype = "float16"\n',
            "'dtype' is 'float16': Input should be 'bfloat16' or 'float32'",
        ),
        (
            GOOD + 'publish = "nccl"\n',
            "'publish' is 'nccl': Input should be 'checkpoint' or 'lora'",
        ),
        (GOOD + "[evaluation]\nevery = 2\n", r"'evaluation\.tasks' is missing"),
        (
            GOOD + HELD_OUT + '[recorder]\nlisten_port = "8899"\n',
            r"\[evaluation\] .*listen_port = 8899",
        ),
        (GOOD + HELD_OUT + "share = 1.0\n", r"'evaluation\.share' is 1\.0"),
        (GOOD + HELD_OUT + "share = 0\n", r"'evaluation\.share' is 0"),
        (
            GOOD + 'service = "http://h:1"\n' + HELD_OUT + "share = 0.5\n",
            (
                r"evaluation\.share = 0\.5 does nothing with service, .* give --evaluation-share to"
                r" `rolltap service`"
            ),
        ),
        (GOOD + HELD_OUT + "every = 0\n", r"'evaluation\.every' is 0"),
        (GOOD + HELD_OUT + "step = 1\n", r"unknown key 'evaluation\.step'"),
        (
            GOOD + HELD_OUT + "sampling = {max_tokens = 0}\n",
            r"evaluation\.sampling: .*is 0: Input should be greater",
        ),
        (
            GOOD + HELD_OUT + "sampling = {temprature = 0}\n",
            r"evaluation\.sampling: .*temprature is unknown: use temp",
        ),
        (
            GOOD + '[forks]\nfrom = "solved"\n',
            r"'forks\.from' is 'solved': Input should be 'failed' or 'any'",
        ),
        (GOOD + '[forks]\nsource = "any"\n', r"unknown key 'forks\.source'"),
        (GOOD + "[forks]\nsessions = 1\n", r"'forks\.sessions' is 1"),
        (
            GOOD + "concurrency = 1\n" + HELD_OUT,
            (
                r"evaluation\.share = 0\.25 leaves no slot for the training with concurrency = 1:"
                r" set concurrency = 2"
            ),
        ),
    ],
)
def test_a_bad_key_is_named_with_its_value(load, text, message):
    with pytest.raises(InputError, match=message):
        load(text)


def test_the_slots_of_a_service_are_not_those_of_a_training_that_evaluates(load):
    text = GOOD + 'service = "http://h:1"\nconcurrency = 1\n' + HELD_OUT
    assert load(text).evaluation is not None


def test_a_missing_recipe_is_named(tmp_path):
    with pytest.raises(InputError, match="cannot read "):
        load_recipe(tmp_path / "none.toml")
