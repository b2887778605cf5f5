"""Training from recorded runs, with a tiny model."""

import json
import re
import shutil
from dataclasses import replace
from math import log
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from peft import PeftModel
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import rolltap
from rolltap.addons.store.metadata import tokenizer_digests
from rolltap.errors import InputError, RunError
from rolltap.trainer.cli import main
from rolltap.trainer.runs.views.report import summarize
from rolltap.trainer.traces.build import Unrewarded
from rolltap.trainer.traces.ledger import Ledger
from rolltap.trainer.traces.sessions import Outcomes, RewardRules
from rolltap.trainer.traces.tables import Score
from rolltap.trainer.traces.trained import read_trained
from rolltap.trainer.training.offline import RecordedGroup, RecordedTraces, recorded_groups
from rolltap.trainer.training.recipe import Recipe, load_recipe
from rolltap.trainer.training.report import METRICS, read_metrics
from tests import factories, tiny_checkpoints
from tests.factories import add_rows, make_call, make_session
from tests.trainer.training.step.tiny import tiny_model

GROUPS = {"a": [0.0, 1.0]}
GRPO = "[grpo]\nlearning_rate = 1e-2\nactivation_checkpointing = false\nmax_grad_norm = 0.0\n"

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory, tokenizer_folder) -> Path:
    """Return the folder of a model with random weights."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.save_pretrained(folder)
    model = tiny_model(
        vocab_size=len(tokenizer),
        initializer_range=0.02,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model.save_pretrained(folder)
    return folder


def write_run(run, model, groups, *, prefix="", sampling="{}", **metadata):
    """Write a run with one session for each reward of `groups` (group id -> rewards; None is a
    fault)."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    digests = tokenizer_digests(tokenizer.get_vocab(), tokenizer.chat_template)
    rows = []
    for number, (group, rewards) in enumerate(groups.items()):
        for index, reward in enumerate(rewards):
            session_id = f"{prefix}{group}-{index}"
            call = make_call(
                "c",
                [5 + number, 6, 7],
                [8 + index, 9, 10, 11 + number],
                session_id=session_id,
                logprobs=[-log(len(tokenizer))] * 4,  # about those of random weights
                version=str(index),
                sampling=sampling,
            )
            session = make_session(
                session_id,
                "infrastructure" if reward is None else "completed",
                group_id=group,
                task_id=f"task {group}",
                reward=reward,
            )
            rows += [call, session]
    return factories.write_run(run, *rows, **{"model": "recorded", **digests, **metadata})


@pytest.fixture
def record(tmp_path, model):
    """A function: name of a run, and its groups -> its folder. See `write_run`."""

    def record(name="run", groups=GROUPS, **how):
        return write_run(tmp_path / name, model, groups, **how)

    return record


@pytest.fixture
def write_recipe(tmp_path, model):
    """A function: the tables of a recipe, and keys -> the recipe's path."""

    def write_recipe(text=GRPO, **keys):
        lines = []
        for key, value in ({"model": str(model), "steps": 1} | keys).items():
            lines.append(f"{key} = {json.dumps(value)}\n")
        path = tmp_path / "recipe.toml"
        path.write_text("".join(lines) + text)
        return path

    return write_recipe


@pytest.fixture
def train(tmp_path, write_recipe):
    """A function that trains on runs into a folder, by a recipe as `write_recipe` writes it."""

    def train(*runs, out="out", text=GRPO, **keys):
        return rolltap.train_offline(write_recipe(text, **keys), runs, out=tmp_path / out)

    return train


@pytest.fixture
def metrics(tmp_path):
    """A function that returns the metrics of the only step of the training into `out`."""

    def metrics():
        (line,) = read_metrics(tmp_path / "out" / METRICS)
        return line

    return metrics


def weights(folder):
    return load_file(folder / "model.safetensors")


def equal(first, second):
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)


def command(write_recipe, run, out, *more, **keys):
    arguments = ["train", str(write_recipe(**keys)), "--from", str(run), "--out", str(out), *more]
    return CliRunner().invoke(main.rolltap, arguments)


def test_two_steps_change_the_weights_a_second_time_in_the_same_way_and_a_resumed_training_too(
    record, model, write_recipe, train, tmp_path
):
    run = record(groups={"a": [0.0, 1.0], "b": [1.0, 0.0, 0.5], "c": [1.0, 0.0, None]})
    once, stopped = tmp_path / "once", tmp_path / "stopped"
    assert command(write_recipe, run, once, steps=2).exit_code == 0
    trained = weights(once / "model")
    assert equal(weights(train(run, out="again", steps=2)), trained)
    assert not equal(trained, weights(model))

    shutil.copytree(once, stopped)
    shutil.rmtree(stopped / "model")
    shutil.rmtree(stopped / "checkpoints" / "checkpoint-2")
    assert train(run, out="stopped", steps=2) == stopped / "model"
    assert equal(weights(stopped / "model"), trained)
    rows = read_trained(stopped)
    expected = [replace(row, version=None) for row in read_trained(once)]
    assert [replace(row, version=None) for row in rows] == expected
    attempts = {(row.step, row.version.partition(".")[2]) for row in rows}
    assert attempts == {(1, "0.0"), (2, "1.1")}  # the second step was taken again
    in_metrics = [line["tokens_trained"] for line in read_metrics(stopped / METRICS)]
    assert [step.trained for step in rolltap.read_training(stopped).steps] == in_metrics
    assert [step.trained for step in rolltap.open_run(stopped).summary().trained] == in_metrics


def test_an_adapter_is_trained_on_several_runs_whose_sessions_of_one_name_are_two(
    record, train, tmp_path
):
    first = record("first", {"a": [0.0, 1.0]})
    second = record("second", {"a": [1.0, 0.0, 0.0]})
    lora = '[lora]\nr = 4\ntarget_modules = ["q_proj"]\n'
    folder = train(first, second, text=GRPO + lora, groups_per_step=2)
    trained = {row.session_id: (row.group_id, row.reward) for row in read_trained(tmp_path / "out")}
    assert trained == {
        "0/a-0": ("0/a", 0.0),
        "0/a-1": ("0/a", 1.0),
        "1/a-0": ("1/a", 1.0),
        "1/a-1": ("1/a", 0.0),
        "a-2": ("1/a", 0.0),
    }
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    changed = [name for name in adapter if "lora_B" in name and adapter[name].abs().max() > 0]
    assert changed  # it begins as 0


@pytest.mark.filterwarnings("ignore:The following .* keys did not match:RuntimeWarning")
def test_an_adapter_on_experts_is_saved_merged_and_under_pefts_names(
    tmp_path, tokenizer_folder, train
):
    base = tiny_checkpoints.qwen3_moe(tmp_path, tokenizer_folder)
    run = write_run(tmp_path / "x", base, GROUPS)
    lora = '[lora]\nr = 4\ntarget_modules = "all-linear"\n'
    folder = train(run, text=GRPO + lora, model=str(base))
    ids = torch.arange(5, 45)[None]
    merged = AutoModelForCausalLM.from_pretrained(folder)
    plain = AutoModelForCausalLM.from_pretrained(base)
    before = plain(ids).logits
    adapted = PeftModel.from_pretrained(plain, folder / "adapter")
    torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, atol=1e-5, rtol=1e-5)
    assert (adapted(ids).logits - before).abs().max() > 1e-3
    old, new = weights(base), weights(folder)
    assert [name for name in old if "experts" in name and not torch.equal(old[name], new[name])]


def test_a_resumed_training_needs_the_same_groups(record, train, tmp_path):
    train(record())
    shutil.rmtree(tmp_path / "out" / "model")
    message = "was begun with other values of the recorded groups: start in another"
    with pytest.raises(InputError, match=message):
        train(record("other", {"z": [0.0, 1.0]}))


def test_a_finished_training_is_not_overwritten(record, train, tmp_path):
    (tmp_path / "out" / "model").mkdir(parents=True)
    message = r"finished training without checkpoints: .* start in another folder"
    with pytest.raises(InputError, match=message):
        train(record())


def test_a_finished_training_takes_more_steps_as_one_that_had_them_from_the_start(
    record, train, tmp_path
):
    run = record(groups={"a": [0.0, 1.0], "b": [1.0, 0.0]})
    constant = GRPO + "lr_scheduler_type = 'constant'\n"
    once = weights(train(run, out="once", text=constant, steps=2))
    first = weights(train(run, text=constant))
    message = "steps = 1 is no more than its 1: choose another folder, or set more steps"
    with pytest.raises(InputError, match=message):
        train(run, text=constant)
    assert equal(weights(train(run, text=constant, steps=2)), once)
    assert equal(weights(tmp_path / "out" / "model-1"), first)


def test_a_finished_training_whose_learning_rates_follow_from_its_steps_names_the_lines_that_go_on(
    record, train, tmp_path
):
    run = record()
    train(run)
    lines = f'model = "{tmp_path}/out/model"\nsteps = 3'
    message = f"start in another folder with a recipe that has the lines\n{lines}"
    with pytest.raises(InputError, match=re.escape(message)):
        train(run, steps=4)


def source_of(*runs, **keys):
    """Return the source of a training from runs, after its checks."""
    recipe = Recipe(model="m", steps=1, **keys)
    source = RecordedTraces(recipe, runs, out=Path("out"), seed=0, console=Console())
    source.groups = recorded_groups(runs, recipe.trace_options().rewards)
    return source


def test_groups_have_the_sessions_with_a_reward_if_the_rewards_differ(record):
    first = record("first", {"a": [0.0, 1.0, None], "same": [1.0, 1.0], "none": [None]})
    second = record("second", prefix="x")
    assert recorded_groups([first, second], RewardRules()) == [
        RecordedGroup(0, "a", ("a-0", "a-1"), ("a-2",), "task a", (0.0, 1.0)),
        RecordedGroup(1, "a", ("xa-0", "xa-1"), (), "task a", (0.0, 1.0)),
    ]


def test_the_ledgers_of_all_rows_and_of_the_groups_that_are_none_add_up_to_that_of_the_run(record):
    rewards = {"a": [0.0, 1.0, None], "same": [1.0, 1.0, None], "none": [None], "b": [1.0, 0.0]}
    run = record(groups=rewards)
    add_rows(run, make_call(session_id="unknown"))
    source = source_of(run)
    batch = source([{"group": group} for group in range(len(source.groups))])
    ledger, text = source.skipped()
    assert batch.ledger == Ledger(sampled=20, trained=16, left_out={"infrastructure": 4})
    left_out = {"no_signal": 8, "infrastructure": 8, "no_reward": 1}
    assert ledger == Ledger(sampled=17, left_out=left_out)
    recorded = summarize(run).ledger
    assert batch.ledger + ledger == recorded + Ledger(trained=-8, left_out={"no_signal": 8})
    lost = Unrewarded(group_id="0/a", reason="infrastructure", status="infrastructure")
    assert batch.unrewarded == {"a-2": lost}
    assert text == (
        "1 group whose rewards are equal (3 sessions), 2 groups without a reward (2 sessions); "
        "tokens 17: 0 to train, left out: 8 infrastructure, 1 no_reward, 8 no_signal"
    )


def test_a_row_has_the_rewards_of_the_recipe_and_not_those_of_the_run(record):
    run = record(groups={"a": [1.0, 1.0], "b": [0.0, 1.0]})
    late = make_session("b-1", "timeout", group_id="b", reward=1.0, revision=1)
    cheated = make_session("a-1", group_id="a", suspicions={"git_history": 2}, revision=1)
    add_rows(run, late, cheated)
    assert [group.group_id for group in recorded_groups([run], RewardRules())] == ["b"]
    source = source_of(run, outcomes=Outcomes(timeout="exclude"), suspicious=0.5)
    (group,) = source.groups
    assert group.group_id == "a"
    rewards = source([{"group": 0}]).rewards
    assert {name: label.reward for name, label in rewards.items()} == {"a-0": 1.0, "a-1": 0.5}
    assert source.skipped()[0].left_out == {"excluded": 4, "no_signal": 4}


def test_what_is_no_row_is_printed_at_the_start_and_what_has_no_reward_is_in_the_metrics(
    record, write_recipe, tmp_path, metrics
):
    run = record(groups={"a": [0.0, 1.0, None], "same": [1.0, 1.0]})
    ended = command(write_recipe, run, tmp_path / "out")
    printed = " ".join(ended.output.split())
    assert "1 groups to train, of 2 sessions" in printed
    assert "not trained: 1 group whose rewards are equal (2 sessions); tokens 8: 0" in printed
    assert f"next: rolltap view {tmp_path / 'out'}\n" in ended.output
    line = metrics()
    expected = {
        "sessions": 3,
        "sessions_infrastructure": 1,
        "left_out/infrastructure": 4,
        "reward/task/task%20a": 0.5,
    }
    assert line.items() >= expected.items()
    assert line["off_policy/root"] > 0
    assert "difference/root" not in line


def test_groups_of_one_name_in_two_runs_are_two_groups(record):
    source = source_of(record("x", prefix="x"), record("y", prefix="y"))
    batch = source([{"group": 1}])
    assert {reward.group_id for reward in batch.rewards.values()} == {"1/a"}
    traces = [(trace.session_id, trace.group_id) for trace in batch.traces]
    assert traces == [("ya-0", "1/a"), ("ya-1", "1/a")]
    assert batch.ledger.trained == batch.ledger.sampled == 8
    assert source.skipped() == (Ledger(), "")  # all groups are rows: nothing is said


HOT = {"sampling": '{"temperature": 0.7}'}
OTHER_TEMPERATURE = (
    r"call c of session a-[01] was sampled at temperature 0\.7, but grpo\.temperature is 1\.0"
)


@pytest.mark.parametrize(
    ("recorded", "recipe", "message"),
    [
        ({"groups": {"a": [None]}}, {}, "nothing to train on in .*: no session has a reward"),
        ({"groups": {"a": [1.0, 1.0]}}, {}, "the rewards of each of its 1 groups are equal"),
        ({"tokenizer_sha256": "x"}, {}, "another tokenizer than .*; its model was recorded"),
        ({"chat_template_sha256": "x"}, {}, "recorded with another chat template"),
        (HOT, {}, OTHER_TEMPERATURE),
        ({}, {"groups_per_step": 2}, "groups_per_step is 2, but the runs have 1 groups to train"),
        ({}, {"text": "[grpo]\nlearning_rat = 1\n"}, "learning_rat"),
    ],
)
def test_runs_that_do_not_fit_the_recipe_are_refused(record, train, recorded, recipe, message):
    with pytest.raises(InputError, match=message):
        train(record(**recorded), **recipe)


@pytest.mark.parametrize(
    "sampling",
    [{"top_p": 0.5}, {"top_k": 20}, {"min_p": 0.1}, {"presence_penalty": 1}, {"seed": 3}],
)
def test_runs_that_were_sampled_in_a_way_that_biases_the_loss_are_refused(record, train, sampling):
    ((key, value),) = sampling.items()
    message = rf"call c .* was sampled with {key} = {value}: .* \(Run.filter\)"
    with pytest.raises(InputError, match=message):
        train(record(sampling=json.dumps({"temperature": 1.0, **sampling})))


def test_the_recorded_temperature_may_be_the_recipes(record, write_recipe, tmp_path):
    recipe = load_recipe(write_recipe(GRPO + "temperature = 0.7\n"))
    out = tmp_path / "out"
    source = RecordedTraces(recipe, [record(**HOT)], out=out, seed=0, console=Console())
    assert source.check() == {"group": [0], "task_id": ["task a"]}


def test_a_folder_that_is_not_a_run_and_a_run_named_twice_are_refused(record, train, tmp_path):
    run = record()
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="empty is not a run folder"):
        train(run, tmp_path / "empty")
    message = r"both have session a-0, .*, with the same content: leave one run out"
    with pytest.raises(InputError, match=message):
        train(run, run)
    with pytest.raises(InputError, match="the list of runs is empty"):
        train()


def test_from_and_an_engine_exclude_each_other(record, write_recipe, tmp_path):
    ended = command(write_recipe, record(), tmp_path / "out", "--engine", "http://e")
    assert ended.exit_code == 2
    assert "--from trains without an engine" in ended.output


@pytest.fixture
def roll_out(tmp_path, write_recipe):
    """A function that starts a training which rolls out, by keys of its recipe."""

    def roll_out(**keys):
        rolltap.train(write_recipe(**keys), engine="http://127.0.0.1:9", out=tmp_path / "out")

    return roll_out


def test_a_recipe_without_tasks_cannot_roll_out(roll_out, tmp_path):
    with pytest.raises(InputError, match="the recipe has no key 'tasks': add it for rollouts"):
        roll_out()
    (tmp_path / "tasks.jsonl").write_text('{"id": "a", "instruction": "go", "evaluate": ["true"]}')
    with pytest.raises(InputError, match="the recipe has no key 'harness'"):
        roll_out(tasks="tasks.jsonl")


def score(run, name="big", version="1", leave_out=""):
    """Add scores of the name, by which all tokens are likely. Returns the run."""
    for session_id, calls in rolltap.open_run(run).calls.items():
        for call in calls:
            row = Score(
                session_id=session_id,
                call_id=call.call_id,
                name=name,
                scorer=f"/big {version}",
                logprobs=[-0.1] * len(call.completion_ids),
            )
            if session_id != leave_out:
                add_rows(run, row)
    return run


class TestTeacher:
    def test_groups_of_equal_rewards_and_sessions_without_one_are_trained_by_the_teacher(
        self, record, train, model, metrics
    ):
        run = score(record(groups={"a": [0.0, 1.0], "same": [1.0, 1.0], "none": [None]}))
        add_rows(run, make_session("none-0", group_id="none", revision=1, reward=None))
        trained = train(run, groups_per_step=3, teacher="big")
        line = metrics()
        expected = {"tokens_trained": 20, "tokens_computed": 20, "left_out/no_signal": 0}
        assert line.items() >= expected.items()
        # random weights find no token likely
        assert line["teacher_kl"] == pytest.approx(-7.3, abs=0.1)
        ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
        likely = []
        for folder in (model, trained):
            logits = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
            chosen = logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])
            likely.append(chosen[2:].sum())
        assert likely[1] > likely[0] + 1

    def test_a_share_of_the_rewards_keeps_those_without_one_out(self, record, train, metrics):
        run = score(record(groups={"a": [0.0, 1.0, None], "same": [1.0, 1.0]}))
        add_rows(run, make_session("a-2", group_id="a", revision=1, reward=None))
        train(run, text=f"{GRPO}teacher_share = 0.5\n", groups_per_step=2, teacher="big")
        expected = {"tokens_trained": 16, "left_out/no_reward": 4, "left_out/no_signal": 0}
        assert metrics().items() >= expected.items()

    def test_calls_without_scores_are_left_out_by_that_name(self, record, train, tmp_path, metrics):
        train(score(record(), leave_out="a-1"), teacher="big")
        assert metrics().items() >= {"tokens_trained": 4, "left_out/missing_scores": 4}.items()
        rows = {row.session_id: row.ledger for row in read_trained(tmp_path / "out")}
        assert rows["a-1"] == Ledger(sampled=4, left_out={"missing_scores": 4})

    @pytest.mark.parametrize(
        ("keys", "grpo", "message"),
        [
            (
                {"teacher": "small"},
                "",
                r"no scores 'small', but big, both: `rolltap score .*small`",
            ),
            ({"teacher": "both"}, "", r"the scores 'both' of the runs are of /big .* and /big .*:"),
            ({"teacher": "big"}, "temperature = 0.7", "grpo.temperature = 0.7 with a teacher"),
            ({"teacher": "big"}, "teacher_share = 0.0", "teacher and a grpo.teacher_share above 0"),
            ({}, "teacher_share = 0.5", "teacher and a grpo.teacher_share above 0 need each other"),
            (
                {"teacher": "big", "replace_zero_variance": 1},
                "",
                "all groups train: remove replace",
            ),
        ],
    )
    def test_what_cannot_be_taught_is_refused_by_name(self, record, train, keys, grpo, message):
        runs = []
        for name in "xy":
            run = record(name, prefix=name)
            runs.append(score(score(run), "both", version=name))
        with pytest.raises(InputError, match=message):
            train(*runs, text=f"{GRPO}{grpo}\n", **keys)

    @pytest.mark.parametrize(
        "given", [{}, {"teacher_engine": "http://127.0.0.1:8,http://127.0.0.1:9"}]
    )
    def test_a_training_that_rolls_out_needs_another_engine_for_its_teacher(self, roll_out, given):
        message = r"teacher_engine is .*: give the URL of another engine than"
        with pytest.raises(InputError, match=message):
            roll_out(teacher="big", **given)
