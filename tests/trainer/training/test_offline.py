"""Training from recorded runs, with a tiny model."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from peft import PeftModel
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import rolltap
from rolltap.addons.store.metadata import tokenizer_digests, write_metadata
from rolltap.addons.store.records import Call, Session, VersionSpan
from rolltap.addons.store.tables import RunWriter
from rolltap.errors import InputError, RunError
from rolltap.trainer.cli import main
from rolltap.trainer.runs.views.report import summarize
from rolltap.trainer.traces.build import Unrewarded
from rolltap.trainer.traces.ledger import Ledger
from rolltap.trainer.traces.sessions import Outcomes, RewardRules
from rolltap.trainer.traces.tables import Score
from rolltap.trainer.traces.trained import read_trained
from rolltap.trainer.training.offline import RecordedGroup, RecordedTraces, recorded_groups
from rolltap.trainer.training.recipe import Recipe
from rolltap.trainer.training.report import METRICS, read_metrics
from tests import tiny_checkpoints
from tests.factories import add_rows
from tests.trainer.training.step.tiny import tiny_model

GROUPS = {"a": [0.0, 1.0]}
RECIPE = Recipe(model="m", steps=1)
GRPO = "[grpo]\nlearning_rate = 1e-2\nactivation_checkpointing = false\nmax_grad_norm = 0.0\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory, tokenizer_folder) -> Path:
    """Return the folder of a model with random weights."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.save_pretrained(folder)
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id")}
    tiny_model(vocab_size=len(tokenizer), initializer_range=0.02, **ids).save_pretrained(folder)
    return folder


def write_run(run, model, groups, *, prefix="", sampling="{}", **metadata):
    """Write a run with one session for each reward of `groups` (group id -> rewards; None is a
    fault)."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    digests = tokenizer_digests(tokenizer.get_vocab(), tokenizer.chat_template)
    write_metadata(run, {"model": "recorded", **digests, **metadata})
    with RunWriter(run) as writer:
        for number, (group, rewards) in enumerate(groups.items()):
            for index, reward in enumerate(rewards):
                session_id = f"{prefix}{group}-{index}"
                # about the log-probabilities of random weights
                logprobs = [-torch.tensor(float(len(tokenizer))).log().item()] * 4
                writer.add_call(
                    Call(
                        session_id=session_id,
                        call_id="c",
                        prompt_ids=[5 + number, 6, 7],
                        completion_ids=[8 + index, 9, 10, 11 + number],
                        logprobs=logprobs,
                        weight_versions=[VersionSpan(version=str(index), start=0, end=4)],
                        sampling=sampling,
                    )
                )
                status = "infrastructure" if reward is None else "completed"
                labels = {"group_id": group, "task_id": f"task {group}"}
                writer.add_session(
                    Session(session_id=session_id, status=status, reward=reward, **labels)
                )
    return run


@pytest.fixture
def write_recipe(tmp_path, model):
    def write_recipe(text=GRPO, **values):
        settings = {"model": str(model), "steps": 2, **values}
        path = tmp_path / "recipe.toml"
        path.write_text(
            "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()) + text
        )
        return path

    return write_recipe


@pytest.fixture
def run(tmp_path, model):
    return write_run(
        tmp_path / "run", model, {"a": [0.0, 1.0], "b": [1.0, 0.0, 0.5], "c": [1.0, 0.0, None]}
    )


def weights(folder):
    return load_file(folder / "model.safetensors")


def equal(first, second):
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def test_two_steps_change_the_weights_a_second_time_in_the_same_way_and_a_resumed_training_too(
    run, model, write_recipe, tmp_path
):
    trained = []
    for name in ("once", "again"):
        arguments = [
            "train",
            str(write_recipe()),
            "--from",
            str(run),
            "--out",
            str(tmp_path / name),
        ]
        ended = CliRunner().invoke(main.rolltap, arguments, catch_exceptions=False)
        assert ended.exit_code == 0
        trained.append(weights(tmp_path / name / "model"))
    assert equal(*trained)
    assert not equal(trained[0], weights(model))

    stopped = tmp_path / "stopped"
    shutil.copytree(tmp_path / "once", stopped)
    shutil.rmtree(stopped / "model")
    shutil.rmtree(stopped / "checkpoints" / "checkpoint-2")
    assert rolltap.train_offline(write_recipe(), [run], out=stopped) == stopped / "model"
    assert equal(weights(stopped / "model"), trained[0])
    rows, before = (read_trained(tmp_path / name) for name in ("stopped", "once"))
    assert [replace(row, version=None) for row in rows] == [
        replace(row, version=None) for row in before
    ]
    attempts = {(row.step, row.version.partition(".")[2]) for row in rows}
    assert attempts == {(1, "0.0"), (2, "1.1")}  # the second step was taken again
    in_metrics = [line["tokens_trained"] for line in read_metrics(stopped / METRICS)]
    assert [step.trained for step in rolltap.read_training(stopped).steps] == in_metrics
    assert [step.trained for step in rolltap.open_run(stopped).summary().trained] == in_metrics


@pytest.fixture
def two_runs(tmp_path, model):
    return [write_run(tmp_path / name, model, GROUPS, prefix=name) for name in ("x", "y")]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_is_trained_on_several_runs(tmp_path, two_runs, write_recipe):
    recipe = write_recipe(
        f'{GRPO}[lora]\nr = 4\ntarget_modules = ["q_proj"]\n', steps=1, groups_per_step=2
    )
    folder = rolltap.train_offline(recipe, two_runs, out=tmp_path / "out")
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert any(
        weight.abs().max() > 0 for name, weight in adapter.items() if "lora_B" in name
    )  # it begins as 0


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:The following .* keys did not match:RuntimeWarning")
def test_an_adapter_on_experts_is_saved_merged_and_under_pefts_names(
    tmp_path, tokenizer_folder, write_recipe
):
    base = tiny_checkpoints.qwen3_moe(tmp_path, tokenizer_folder)
    runs = [write_run(tmp_path / "x", base, GROUPS)]
    recipe = write_recipe(
        f'{GRPO}[lora]\nr = 4\ntarget_modules = "all-linear"\n', steps=1, model=str(base)
    )
    folder = rolltap.train_offline(recipe, runs, out=tmp_path / "out")
    ids = torch.arange(5, 45)[None]
    merged, plain = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, base))
    before = plain(ids).logits
    adapted = PeftModel.from_pretrained(plain, folder / "adapter")
    torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, atol=1e-5, rtol=1e-5)
    assert (adapted(ids).logits - before).abs().max() > 1e-3
    assert [
        name
        for name in weights(base)
        if "experts" in name and not torch.equal(weights(base)[name], weights(folder)[name])
    ]


def test_a_resumed_training_needs_the_same_groups(run, model, write_recipe, tmp_path):
    rolltap.train_offline(write_recipe(steps=1), [run], out=tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "model")
    other = write_run(tmp_path / "other", model, {"z": [0.0, 1.0]})
    with pytest.raises(
        InputError, match="was begun with other values of the recorded groups: start in another"
    ):
        rolltap.train_offline(write_recipe(steps=1), [other], out=tmp_path / "out")


def test_a_finished_training_is_not_overwritten(run, write_recipe, tmp_path):
    (tmp_path / "out" / "model").mkdir(parents=True)
    with pytest.raises(
        InputError, match=r"finished training without checkpoints: .* start in another folder"
    ):
        rolltap.train_offline(write_recipe(), [run], out=tmp_path / "out")


def test_a_finished_training_takes_more_steps_as_one_that_had_them_from_the_start(
    run, write_recipe, tmp_path
):
    constant = GRPO + "lr_scheduler_type = 'constant'\n"
    rolltap.train_offline(write_recipe(constant, steps=2), [run], out=tmp_path / "once")
    rolltap.train_offline(write_recipe(constant, steps=1), [run], out=tmp_path / "out")
    first = weights(tmp_path / "out" / "model")
    with pytest.raises(
        InputError,
        match="steps = 1 is no more than its 1: choose another folder, or set more steps",
    ):
        rolltap.train_offline(write_recipe(constant, steps=1), [run], out=tmp_path / "out")
    rolltap.train_offline(write_recipe(constant, steps=2), [run], out=tmp_path / "out")
    assert equal(weights(tmp_path / "out" / "model"), weights(tmp_path / "once" / "model"))
    assert equal(weights(tmp_path / "out" / "model-1"), first)


def test_a_finished_training_whose_learning_rates_follow_from_its_steps_names_the_lines_that_go_on(
    run, write_recipe, tmp_path
):
    rolltap.train_offline(write_recipe(steps=1), [run], out=tmp_path / "out")
    lines = (
        "start in another folder with a recipe that has the lines\nmodel ="
        f' "{tmp_path}/out/model"\nsteps = 3'
    )
    with pytest.raises(InputError, match=re.escape(lines)):
        rolltap.train_offline(write_recipe(steps=4), [run], out=tmp_path / "out")


def source_of(runs, recipe=RECIPE):
    """Return the source of a training from runs, after its checks."""
    source = RecordedTraces(recipe, runs, out=Path("out"), seed=0, console=Console())
    source.groups = recorded_groups(runs, recipe.trace_options().rewards)
    return source


def test_groups_have_the_sessions_with_a_reward_if_the_rewards_differ(tmp_path, model):
    first = write_run(
        tmp_path / "first", model, {"a": [0.0, 1.0, None], "same": [1.0, 1.0], "none": [None]}
    )
    second = write_run(tmp_path / "second", model, {"a": [0.0, 1.0]}, prefix="x")
    assert recorded_groups([first, second], RewardRules()) == [
        RecordedGroup(0, "a", ("a-0", "a-1"), ("a-2",), "task a", (0.0, 1.0)),
        RecordedGroup(1, "a", ("xa-0", "xa-1"), (), "task a", (0.0, 1.0)),
    ]


def test_the_ledgers_of_all_rows_and_of_the_groups_that_are_none_add_up_to_that_of_the_run(
    tmp_path, model
):
    rewards = {"a": [0.0, 1.0, None], "same": [1.0, 1.0, None], "none": [None], "b": [1.0, 0.0]}
    run = write_run(tmp_path / "run", model, rewards)
    with RunWriter(run) as writer:
        spans = [VersionSpan(version="0", start=0, end=1)]
        fields = {
            "prompt_ids": [1],
            "completion_ids": [2],
            "logprobs": [-1.0],
            "weight_versions": spans,
        }
        writer.add_call(Call(session_id="unknown", call_id="c", **fields))
    source = source_of([run])
    batch = source([{"group": group} for group in range(len(source.groups))])
    ledger, text = source.skipped()
    assert batch.ledger == Ledger(sampled=20, trained=16, left_out={"infrastructure": 4})
    assert ledger == Ledger(
        sampled=17, left_out={"no_signal": 8, "infrastructure": 8, "no_reward": 1}
    )
    total, recorded = batch.ledger + ledger, summarize(run).ledger
    assert total == recorded + Ledger(trained=-8, left_out={"no_signal": 8})
    assert batch.unrewarded == {
        "a-2": Unrewarded(group_id="0/a", reason="infrastructure", status="infrastructure")
    }
    assert (
        text
        == "1 group whose rewards are equal (3 sessions), 2 groups without a reward (2 sessions); "
        "tokens 17: 0 to train, left out: 8 infrastructure, 1 no_reward, 8 no_signal"
    )


def test_a_row_has_the_rewards_of_the_recipe_and_not_those_of_the_run(tmp_path, model):
    run = write_run(tmp_path / "run", model, {"a": [1.0, 1.0], "b": [0.0, 1.0]})
    late = Session(session_id="b-1", task_id="task b", group_id="b", status="timeout", reward=1.0)
    with RunWriter(run) as writer:
        writer.add_session(replace(late, revision=1))
        cheated = {
            "session_id": "a-1",
            "task_id": "task a",
            "group_id": "a",
            "revision": 1,
            "reward": 1.0,
        }
        writer.add_session(Session(**cheated, status="completed", suspicions={"git_history": 2}))
    assert [group.group_id for group in recorded_groups([run], RewardRules())] == ["b"]
    source = source_of(
        [run], Recipe(model="m", steps=1, outcomes=Outcomes(timeout="exclude"), suspicious=0.5)
    )
    [group] = source.groups
    assert (group.group_id, group.session_ids) == ("a", ("a-0", "a-1"))
    batch = source([{"group": 0}])
    assert {name: label.reward for name, label in batch.rewards.items()} == {"a-0": 1.0, "a-1": 0.5}
    assert source.skipped()[0].left_out == {"excluded": 4, "no_signal": 4}


def test_what_is_no_row_is_printed_at_the_start_and_what_has_no_reward_is_in_the_metrics(
    tmp_path, model, write_recipe
):
    run = write_run(tmp_path / "run", model, {"a": [0.0, 1.0, None], "same": [1.0, 1.0]})
    arguments = [
        "train",
        str(write_recipe(steps=1)),
        "--from",
        str(run),
        "--out",
        str(tmp_path / "out"),
    ]
    ended = CliRunner().invoke(main.rolltap, arguments, catch_exceptions=False)
    printed = " ".join(ended.output.split())
    assert "1 groups to train, of 2 sessions" in printed
    assert f"next: rolltap view {tmp_path / 'out'}\n" in ended.output
    assert (
        "not trained: 1 group whose rewards are equal (2 sessions); tokens 8: 0 to train" in printed
    )
    [line] = read_metrics(tmp_path / "out" / METRICS)
    assert (line["sessions"], line["sessions_infrastructure"], line["left_out/infrastructure"]) == (
        3,
        1,
        4,
    )
    assert line["reward/task/task%20a"] == 0.5
    assert line["off_policy/root"] > 0
    assert "difference/root" not in line


def test_groups_of_one_name_in_two_runs_are_two_groups(two_runs):
    source = source_of(two_runs)
    batch = source([{"group": 1}])
    assert {reward.group_id for reward in batch.rewards.values()} == {"1/a"}
    assert [(trace.session_id, trace.group_id) for trace in batch.traces] == [
        ("ya-0", "1/a"),
        ("ya-1", "1/a"),
    ]
    assert batch.ledger.trained == batch.ledger.sampled == 8
    assert source.skipped() == (Ledger(), "")  # all groups are rows: nothing is said


def test_sessions_of_one_name_in_two_runs_are_two_sessions(tmp_path, model, write_recipe):
    first = write_run(tmp_path / "first", model, {"a": [0.0, 1.0]})
    second = write_run(tmp_path / "second", model, {"a": [1.0, 0.0]})
    rolltap.train_offline(
        write_recipe(steps=1, groups_per_step=2), [first, second], out=tmp_path / "out"
    )
    trained = {row.session_id: (row.group_id, row.reward) for row in read_trained(tmp_path / "out")}
    assert trained == {
        "0/a-0": ("0/a", 0.0),
        "0/a-1": ("0/a", 1.0),
        "1/a-0": ("1/a", 1.0),
        "1/a-1": ("1/a", 0.0),
    }


HOT = {"sampling": '{"temperature": 0.7}'}


@pytest.mark.parametrize(
    ("groups", "how", "text", "message"),
    [
        ({"a": [None]}, {}, GRPO, "nothing to train on in .*: no session has a reward"),
        ({"a": [1.0, 1.0]}, {}, GRPO, "the rewards of each of its 1 groups are equal"),
        (
            GROUPS,
            {"tokenizer_sha256": "other"},
            GRPO,
            "another tokenizer than .*; its model was recorded",
        ),
        (GROUPS, {"chat_template_sha256": "other"}, GRPO, "recorded with another chat template"),
        (
            GROUPS,
            HOT,
            GRPO,
            (
                r"call c of session a-[01] was sampled at temperature 0\.7, but grpo\.temperature"
                r" is 1\.0"
            ),
        ),
        *(
            (
                GROUPS,
                {"sampling": json.dumps(sampling)},
                GRPO,
                rf"call c .* was sampled with {message}: .* \(Run.filter\)",
            )
            for sampling, message in (
                ({"temperature": 1.0, "top_p": 0.5}, r"top_p = 0\.5"),
                ({"top_k": 20}, "top_k = 20"),
                ({"min_p": 0.1}, r"min_p = 0\.1"),
                ({"presence_penalty": 1}, "presence_penalty = 1"),
                ({"seed": 3}, "seed = 3"),
            )
        ),
        (
            GROUPS,
            {},
            "groups_per_step = 2\n",
            "groups_per_step is 2, but the runs have 1 groups to train",
        ),
        (GROUPS, {}, "[grpo]\nlearning_rat = 1\n", "learning_rat"),
    ],
)
def test_runs_that_do_not_fit_the_recipe_are_refused(
    tmp_path, model, write_recipe, groups, how, text, message
):
    run = write_run(tmp_path / "run", model, groups, **how)
    with pytest.raises(InputError, match=message):
        rolltap.train_offline(write_recipe(text), [run], out=tmp_path / "out")


def test_the_recorded_temperature_may_be_the_recipes(tmp_path, model, write_recipe):
    run = write_run(tmp_path / "run", model, GROUPS, **HOT)
    rolltap.train_offline(
        write_recipe(GRPO + "temperature = 0.7\n", steps=1), [run], out=tmp_path / "out"
    )


def test_a_folder_that_is_not_a_run_and_a_run_named_twice_are_refused(tmp_path, run, write_recipe):
    (tmp_path / "empty").mkdir()
    for runs, error, message in [
        ([run, tmp_path / "empty"], RunError, "empty is not a run folder"),
        (
            [run, run],
            InputError,
            r"both have session a-0, .*, with the same content: leave one run out",
        ),
        ([], InputError, "the list of runs is empty"),
    ]:
        with pytest.raises(error, match=message):
            rolltap.train_offline(write_recipe(), runs, out=tmp_path / "out")


def test_from_and_an_engine_exclude_each_other(tmp_path, run, write_recipe):
    arguments = [
        "train",
        str(write_recipe()),
        "--from",
        str(run),
        "--engine",
        "http://e",
        "--out",
        str(tmp_path / "o"),
    ]
    ended = CliRunner().invoke(main.rolltap, arguments)
    assert ended.exit_code == 2
    assert "--from trains without an engine" in ended.output


def test_a_recipe_without_tasks_cannot_roll_out(tmp_path, write_recipe):
    with pytest.raises(InputError, match="the recipe has no key 'tasks': add it for rollouts"):
        rolltap.train(write_recipe(), engine="http://127.0.0.1:9", out=tmp_path / "out")
    (tmp_path / "tasks.jsonl").write_text('{"id": "a", "instruction": "go", "evaluate": ["true"]}')
    with pytest.raises(InputError, match="the recipe has no key 'harness'"):
        rolltap.train(
            write_recipe(tasks="tasks.jsonl"), engine="http://127.0.0.1:9", out=tmp_path / "out"
        )


def scored(run, name="big", version="1", leave_out=()):
    """Add scores of the name, by which all tokens are likely."""
    for session_id, calls in rolltap.open_run(run).calls.items():
        whose = {
            "session_id": session_id,
            "call_id": "c",
            "name": name,
            "scorer": f"/big {version}",
        }
        if session_id not in leave_out:
            add_rows(
                run, *(Score(**whose, logprobs=[-0.1] * len(call.completion_ids)) for call in calls)
            )
    return run


class TestTeacher:
    def test_groups_of_equal_rewards_and_sessions_without_one_are_trained_by_the_teacher(
        self, tmp_path, model, write_recipe
    ):
        run = scored(
            write_run(
                tmp_path / "run", model, {"a": [0.0, 1.0], "same": [1.0, 1.0], "none": [None]}
            )
        )
        unjudged = Session(
            session_id="none-0", group_id="none", revision=1, status="completed", reward=None
        )
        add_rows(run, unjudged)
        recipe = write_recipe(GRPO, steps=1, groups_per_step=3, teacher="big")
        out = rolltap.train_offline(recipe, [run], out=tmp_path / "out")
        [line] = read_metrics(tmp_path / "out" / METRICS)
        assert (line["tokens_trained"], line["tokens_computed"], line["left_out/no_signal"]) == (
            20,
            20,
            0,
        )
        assert line["teacher_kl"] == pytest.approx(
            -7.3, abs=0.1
        )  # of random weights, which find no token likely
        before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (model, out))
        ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
        likely = [
            m(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[2:].sum()
            for m in (before, after)
        ]
        assert likely[1] > likely[0] + 1

    def test_a_share_of_the_rewards_keeps_those_without_one_out(
        self, tmp_path, model, write_recipe
    ):
        run = scored(
            write_run(tmp_path / "run", model, {"a": [0.0, 1.0, None], "same": [1.0, 1.0]})
        )
        add_rows(
            run,
            Session(session_id="a-2", group_id="a", revision=1, status="completed", reward=None),
        )
        rolltap.train_offline(
            write_recipe(f"{GRPO}teacher_share = 0.5\n", steps=1, groups_per_step=2, teacher="big"),
            [run],
            out=tmp_path / "out",
        )
        [line] = read_metrics(tmp_path / "out" / METRICS)
        assert (line["tokens_trained"], line["left_out/no_reward"], line["left_out/no_signal"]) == (
            16,
            4,
            0,
        )

    def test_calls_without_scores_are_left_out_by_that_name(self, tmp_path, model, write_recipe):
        run = scored(write_run(tmp_path / "run", model, GROUPS), leave_out=["a-1"])
        rolltap.train_offline(write_recipe(steps=1, teacher="big"), [run], out=tmp_path / "out")
        [line] = read_metrics(tmp_path / "out" / METRICS)
        assert (line["tokens_trained"], line["left_out/missing_scores"]) == (4, 4)
        rows = {row.session_id: row.ledger for row in read_trained(tmp_path / "out")}
        assert rows["a-1"] == Ledger(sampled=4, left_out={"missing_scores": 4})

    @pytest.mark.parametrize(
        ("how", "text", "message"),
        [
            (
                {"teacher": "small"},
                GRPO,
                r"has no scores 'small', but big, both: `rolltap score .* --as small`",
            ),
            (
                {"teacher": "both"},
                GRPO,
                r"the scores 'both' of the runs are of /big .* and /big .*: give one",
            ),
            (
                {"teacher": "big"},
                GRPO + "temperature = 0.7\n",
                "grpo.temperature = 0.7 with a teacher, whose scores",
            ),
            (
                {"teacher": "big"},
                GRPO + "teacher_share = 0.0\n",
                "teacher and a grpo.teacher_share above 0 need each",
            ),
            (
                {},
                GRPO + "teacher_share = 0.5\n",
                "teacher and a grpo.teacher_share above 0 need each other",
            ),
            (
                {"teacher": "big", "replace_zero_variance": 1},
                GRPO,
                "with a teacher all groups train: remove replace",
            ),
        ],
    )
    def test_what_cannot_be_taught_is_refused_by_name(
        self, tmp_path, two_runs, write_recipe, how, text, message
    ):
        for version, run in enumerate(two_runs):
            scored(scored(run), "both", version=str(version))
        with pytest.raises(InputError, match=message):
            rolltap.train_offline(write_recipe(text, **how), two_runs, out=tmp_path / "out")

    def test_a_training_that_rolls_out_needs_another_engine_for_its_teacher(
        self, tmp_path, write_recipe
    ):
        for given in ({}, {"teacher_engine": "http://127.0.0.1:8,http://127.0.0.1:9"}):
            with pytest.raises(
                InputError, match=r"teacher_engine is .*: give the URL of another engine than"
            ):
                rolltap.train(
                    write_recipe(teacher="big", **given),
                    engine="http://127.0.0.1:9",
                    out=tmp_path / "out",
                )

    def test_a_resumed_training_keeps_its_teacher(self, tmp_path, model, write_recipe):
        run = scored(write_run(tmp_path / "run", model, GROUPS))
        rolltap.train_offline(write_recipe(steps=1, teacher="big"), [run], out=tmp_path / "out")
        shutil.rmtree(tmp_path / "out" / "model")
        with pytest.raises(
            InputError, match=r"begun with other values of teacher \(it was \"big\"\)"
        ):
            rolltap.train_offline(write_recipe(steps=1), [run], out=tmp_path / "out")
