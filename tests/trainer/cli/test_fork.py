"""`rolltap fork`: a harness runs against recorded replies up to a call, and its model is sampled
from there."""

import json
import sys
from statistics import fmean, stdev

import pytest
import torch

import rolltap
from rolltap.addons.errors import InputError
from rolltap.addons.store.tables import read_rows
from rolltap.trainer.reruns.record import Record
from rolltap.trainer.rollouts.resume import STARTED_AGAIN
from rolltap.trainer.runs.verify import verify_run
from tests.scripted_engine import Say, ScriptedEngine
from tests.trainer.cli.program import run_rolltap
from tests.trainer.training.step.tiny import gradients, relative_difference, tiny_model

AGENT = """
import os, sys
import httpx

messages = [{"role": "system", "content": f"Work in {os.getcwd()}."}, {"role": "user", "content": sys.argv[1]}]
for turn in range(3):
    ask = {"model": "m", "messages": messages}
    reply = httpx.post("https://api.openai.com/v1/chat/completions", json=ask, timeout=60)
    if reply.is_error:
        sys.exit(reply.text)
    content = reply.json()["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "Go on."}]
open("answer.txt", "w").write(content)
"""
JUDGE = {
    "kind": "command",
    "command": ["sh", "-c", "cat answer.txt > $ROLLTAP_REWARD_FILE"],
    "result": "number",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forks")
    (folder / "agent.py").write_text(AGENT)
    script = "cat answer.txt > $ROLLTAP_REWARD_FILE"
    judge = {"kind": "command", "command": ["sh", "-c", script], "result": "number"}
    other = json.dumps({"id": "other", "instruction": "Task other.", "judge": judge})
    task = json.dumps({"id": "t", "instruction": "Task t.", "judge": judge})
    (folder / "tasks.jsonl").write_text(task)
    (folder / "other.jsonl").write_text(other)
    (folder / "all.jsonl").write_text(f"{other}\n{task}")
    for name, instruction in {"own": "{instruction}", "newer": "{instruction} Be quick."}.items():
        (folder / f"{name}.toml").write_text(
            f'name = "own"\nprogram = "{sys.executable}"\nversion_arguments = ["-V"]\n'
            f'headless = ["{folder / "agent.py"}", "{instruction}"]\n'
        )
    return folder


@pytest.fixture(scope="module")
def engine(tokenizer):
    """Yield an engine whose n-th reply is 0.n, from 0. `given` has of each call: prompt ids, reply
    ids and reply."""
    with ScriptedEngine(tokenizer) as engine:
        engine.given = []

        def reply(request):
            text = f"0.{len(engine.given)}"
            ids = [*engine.ids(text), tokenizer.eos_token_id]
            engine.given.append((request["token_ids"], ids, text))
            return Say(text)

        engine.otherwise = reply
        yield engine


@pytest.fixture(scope="module")
def recorded(folder, engine, tokenizer_folder):
    """Record a session of three calls. Return the folder, the session's id and the options of a
    fork."""
    options = ["--engine", engine.url, "--model", tokenizer_folder]
    line = ["rollout", "tasks.jsonl", "--harness", "own.toml", "-n", 1, "--out", "run"]
    ended = run_rolltap(*line, *options, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    (session,) = rolltap.open_run(folder / "run").sessions()
    return folder, session.session_id, [*map(str, options), "--tasks", "all.jsonl"]


@pytest.fixture(scope="module")
def forked(recorded, engine):
    """Fork the session at its second call. Return the command line, the run, and what the engine
    gave in it."""
    folder, session, options = recorded
    before = len(engine.given)
    line = ["fork", "run", session, "--at", 2, "-n", 3, "--out", "forks", *options]
    ended = run_rolltap(*line, "--harness", "own.toml", "--json", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return line, rolltap.open_run(folder / "forks"), engine.given[before:]


def test_forks_are_a_group_whose_own_tokens_alone_are_sampled(recorded, forked):
    folder, session, _ = recorded
    original = rolltap.open_run(folder / "run").calls[session]
    _, run, _ = forked
    forks = list(run.sessions())
    assert [fork.status for fork in forks] == ["completed"] * 3
    assert len({fork.group_id for fork in forks}) == 1
    assert len({fork.reward for fork in forks} - {None}) == 3
    sampled = 0
    for fork in forks:
        first, second = run.calls[fork.session_id]
        assert first.prompt_ids == original[1].prompt_ids
        assert original[0].call_id in first.kind_reason
        assert first.kind == "root"
        assert second.kind == "bridged"
        assert second.parent_id == first.call_id
        sampled += len(first.completion_ids) + len(second.completion_ids)
    assert run.ledger().sampled == run.ledger().trained == sampled
    assert verify_run(run.path, lambda *_: None).findings == []
    why = rf"is a fork, and has only its own calls: give .*{session}"
    with pytest.raises(InputError, match=why):
        Record.of(run.path, forks[0].session_id)


def test_a_fork_that_differs_is_diverged_and_not_tried_again(recorded, forked):
    folder, _, _ = recorded
    line, run, _ = forked
    ended = run_rolltap(*line, "--harness", "newer.toml", cwd=folder)
    assert ended.returncode == 1
    assert "have no reward (3 diverged)" in ended.stderr
    diverged = [fork for fork in run.sessions() if fork.status == "diverged"]
    assert len(diverged) == 3
    for fork in diverged:
        assert fork.error.startswith("diverged at call 1: the message is another one (message 1)")
        assert "Task t. Be quick." in fork.error
    assert "diverged" not in STARTED_AGAIN  # nor by the next start
    kinds = [event["kind"] for event in read_rows(run.path, "events")]
    assert kinds.count("session_started") == 6


def test_the_gradient_of_a_group_of_forks_is_that_of_their_own_tokens_by_the_formula(
    forked, tokenizer, tmp_path
):
    _, run, given = forked  # not the rows, but what the engine was asked and has sampled
    batch = run.traces().batch()
    model = tiny_model(vocab_size=len(tokenizer))
    found = gradients(model, tmp_path, batch, groups_per_step=1, epsilon=1e9, epsilon_high=1e9)

    # a fork is two calls, the second after the first; its last reply is its reward
    forks = []
    for first in given:
        for second in given:
            known = first[0] + first[1]
            if second[0][: len(known)] == known:
                forks.append((first, second))
    assert len(forks) == 3
    assert len(given) == 6
    rewards = [float(text) for _, (_, _, text) in forks]
    deviation = stdev(rewards) + 1e-4  # as in TRL
    loss = torch.zeros(())
    tokens = 0
    for fork, reward in zip(forks, rewards, strict=True):
        for prompt, reply, _ in fork:
            ids = torch.tensor([prompt + reply])
            every = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
            own = every.gather(-1, ids[0, 1:, None])[len(prompt) - 1 :, 0]
            recorded = -0.125 * (1 + torch.arange(len(reply)) % 5)  # of the scripted engine
            ratio = (own - recorded).exp()
            loss -= (ratio * (reward - fmean(rewards)) / deviation).sum()
            tokens += len(reply)
    (loss / tokens).backward()
    expected = {name: weight.grad for name, weight in model.named_parameters()}
    assert relative_difference(expected, found) < 1e-5


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--harness own.toml --at 4", "has 3 completed calls, and no call 4"),
        ("--harness own.toml --at 0", "has 3 completed calls, and no call 0"),
        ("--harness own.toml --at xyz", "has no completed call 'xyz'"),
        ("--harness own.toml --at 1 --tasks other.jsonl", "has no task 't', which is that of ses"),
        ("--at 1", "'own' is not one of rolltap's: give its file with --harness"),
    ],
)
def test_a_call_a_task_or_a_preset_that_is_not_there_is_refused(recorded, options, why):
    folder, session, given = recorded
    line = ["fork", "run", session, "--out", "new", *given, *options.split()]
    refused = run_rolltap(*line, cwd=folder)
    assert refused.returncode == 1
    assert why in " ".join(refused.stderr.split())
    assert not (folder / "new").exists()
