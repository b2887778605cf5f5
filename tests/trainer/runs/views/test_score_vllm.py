"""Scores of a real vLLM: against what it recorded, against the trainer, and as the teacher of a
training."""

import json
from importlib import import_module

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

import rolltap
from rolltap.addons.store.metadata import tokenizer_digests
from rolltap.trainer.engine.admin import EngineAdmin
from tests.conftest import QUICKSTART
from tests.factories import make_session, write_run
from tests.trainer.runs.views.test_check import sample

pytestmark = pytest.mark.engine


def recorded(folder, engine, *calls):
    """Write a run of the engine's model."""
    tokenizer = AutoTokenizer.from_pretrained(engine.model_dir)
    digests = tokenizer_digests(tokenizer.get_vocab(), tokenizer.chat_template)
    names = dict.fromkeys(call.session_id for call in calls)
    sessions = [make_session(name, group_id=name, reward=None) for name in names]
    run = write_run(folder, *calls, *sessions, model=str(engine.model_dir), **digests)
    return rolltap.open_run(run)


def test_the_scores_of_the_same_weights_are_the_recorded_values_and_the_trainers(engine, tmp_path):
    root = sample(engine, "root", [5 + i % 100 for i in range(40)])
    known = [*root.prompt_ids, *root.completion_ids]
    place = {"parent_id": "root", "prefix_length": len(known), "kind": "bridged"}
    calls = [
        root,
        *(
            sample(engine, name, [*known, 7, i], **place)
            for i, name in enumerate(("left", "right"), 8)
        ),
    ]
    run = recorded(tmp_path / "run", engine, *calls)
    report = run.score(engine.url, "same", top_k=3, progress=False)
    assert (report.calls, report.skipped, abs(report.divergence) < 1e-5) == (3, {}, True)
    model, found = (
        Qwen3ForCausalLM.from_pretrained(engine.model_dir, dtype=torch.float32),
        run.scores("same", "s"),
    )
    for call in calls:
        ids, scores = torch.tensor([[*call.prompt_ids, *call.completion_ids]]), found[call.call_id]
        with torch.no_grad():
            every = model(input_ids=ids).logits[0, len(call.prompt_ids) - 1 : -1].log_softmax(-1)
        own = every.gather(-1, ids[0, len(call.prompt_ids) :, None])[:, 0]
        best = np.reshape(scores.top_logprobs, (-1, 3))
        np.testing.assert_allclose(scores.logprobs, call.logprobs, atol=1e-4)
        np.testing.assert_allclose(scores.logprobs, own, atol=1e-3)
        np.testing.assert_allclose(best, every.topk(3).values, atol=1e-3)
        np.testing.assert_allclose(
            best, every.gather(-1, torch.tensor(scores.top_ids).reshape(-1, 3)), atol=1e-3
        )


@pytest.fixture(scope="module")
def choice(engine):
    """Return a prompt of the quickstart, the reply with the right command, and the place where
    commands differ."""
    with pytest.MonkeyPatch.context() as imports:
        imports.syspath_prepend(QUICKSTART)
        make_model, words = import_module("make_model"), import_module("words")
    tokenizer = AutoTokenizer.from_pretrained(engine.model_dir)
    sessions = make_model.Sessions(tokenizer, words.filler_text(), 0)
    prompt, tools = sessions.opening(300)
    prompt = sessions.answer(
        prompt, tokenizer.encode(words.reply(*words.LOOK[0])), "tool", "words.txt", tools
    )
    replies = [tokenizer.encode(words.reply(*command)) for command in words.COUNT]
    return (
        prompt,
        replies[0],
        next(i for i, tokens in enumerate(zip(*replies, strict=True)) if len({*tokens}) > 1),
    )


@pytest.mark.deep  # short, step/test_teacher has it without an engine
@pytest.mark.parametrize("seed", range(3))
def test_a_training_on_the_scores_of_a_teacher_brings_the_student_near_it(
    engine, choice, tmp_path, seed
):
    prompt, right, place = choice
    admin, teacher = (
        EngineAdmin(engine.url),
        Qwen3ForCausalLM.from_pretrained(engine.model_dir, dtype=torch.float32),
    )
    with (
        torch.no_grad()
    ):  # it prefers the right command, which the student takes in a quarter of its sessions
        hidden = teacher.model(torch.tensor([prompt + right[:place]])).last_hidden_state[0, -1]
        teacher.lm_head.weight[right[place]] += 2.5 * hidden / hidden.square().sum()
    teacher.save_pretrained(tmp_path / "teacher")

    def rolled_out(name, student):
        """Return sessions that the student samples, and their scores by the teacher."""
        admin.serve(student, name)
        how = {"max_tokens": 60}
        # a seed for each session makes the test repeatable; a recorded call has none
        calls = [
            sample(
                engine,
                "c",
                prompt,
                session_id=f"{i}",
                parameters={**how, "seed": 1000 * seed + i},
                sampling='{"temperature": 1.0}',
            )
            for i in range(48)
        ]
        admin.serve(tmp_path / "teacher", "teacher")
        run = recorded(tmp_path / name, engine, *calls)
        return run, run.score(engine.url, "big", progress=False)

    recipe = tmp_path / "recipe.toml"
    grpo = (
        'optim = "sgd"\nlearning_rate = 1.0\nlr_scheduler_type ='
        ' "constant"\nactivation_checkpointing = false\n'
    )
    settings = (
        f"model = {json.dumps(str(engine.model_dir))}\nsteps = 1\ngroups_per_step = 48\nteacher ="
        ' "big"\n'
    )
    recipe.write_text(f"{settings}[grpo]\n{grpo}")
    try:
        run, before = rolled_out("before", engine.model_dir)
        student = rolltap.train_offline(recipe, [run.path], out=tmp_path / "out", seed=seed)
        _, after = rolled_out("after", student)
    finally:
        admin.serve(engine.model_dir, "default")
    assert (before.calls, before.scorer) == (48, f"{engine.model_dir} (weights teacher)")
    assert abs(after.divergence) < 0.4 * before.divergence
