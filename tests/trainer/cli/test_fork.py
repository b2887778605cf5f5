"""`rolltap fork`: a harness runs against recorded replies up to a call, and its model is sampled
from there."""

import json
import sys
from statistics import fmean, stdev

import pytest
import torch
from click.testing import CliRunner

import rolltap
from rolltap.addons.errors import InputError, RolltapError
from rolltap.addons.store.tables import read_rows
from rolltap.trainer.cli.main import rolltap as command
from rolltap.trainer.reruns.record import Record
from rolltap.trainer.rollouts.resume import RERUN
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
    tasks = [
        {"id": name, "instruction": f"Task {name}.", "judge": JUDGE} for name in ("other", "t")
    ]
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks[1:])))
    (folder / "all.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    for name, instruction in ("own", "{instruction}"), ("newer", "{instruction} Be quick."):
        arguments = json.dumps([str(folder / "agent.py"), instruction])
        preset = (
            f'name = "own"\nprogram = "{sys.executable}"\nheadless = {arguments}\nversion_arguments'
            ' = ["-V"]\n'
        )
        (folder / f"{name}.toml").write_text(preset)
    return folder


@pytest.fixture(scope="module")
def engine(tokenizer):
    """Yield an engine whose n-th reply is 0.n, from 0. `given` has of each call: prompt ids, reply
    ids and reply."""
    with ScriptedEngine(tokenizer) as engine:
        engine.given = []

        def reply(request):
            text = f"0.{len(engine.given)}"
            engine.given.append(
                (request["token_ids"], [*engine.ids(text), tokenizer.eos_token_id], text)
            )
            return Say(text)

        engine.otherwise = reply
        yield engine


@pytest.fixture(scope="module")
def recorded(folder, engine, tokenizer_folder):
    """Record a session of three calls. Return the folder, the session's id and the options of a
    fork."""
    options = ["--engine", engine.url, "--model", tokenizer_folder]
    rollout = "rollout", "tasks.jsonl", "--harness", "own.toml", "-n", 1, "--out", "run"
    ended = run_rolltap(*rollout, *options, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    (session,) = rolltap.open_run(folder / "run").sessions()
    return folder, session.session_id, [*options, "--tasks", "all.jsonl"]


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


def test_forks_are_a_group_whose_own_tokens_alone_are_sampled_and_a_fork_that_differs_is_not_tried_again(
    recorded, forked
):
    folder, session, _ = recorded
    theirs = rolltap.open_run(folder / "run").calls[session]
    line, run, _ = forked
    forks = list(run.sessions())
    assert [fork.status for fork in forks] == ["completed"] * 3
    assert len({fork.group_id for fork in forks}) == 1
    assert len({fork.reward for fork in forks} - {None}) == 3
    for fork in forks:
        first, second = run.calls[fork.session_id]
        assert list(first.prompt_ids) == list(theirs[1].prompt_ids)
        assert theirs[0].call_id in first.kind_reason
        assert (first.kind, second.kind, second.parent_id) == ("root", "bridged", first.call_id)
    ledger = run.ledger()
    assert (
        ledger.sampled
        == ledger.trained
        == sum(len(call.completion_ids) for fork in forks for call in run.calls[fork.session_id])
    )
    assert verify_run(folder / "forks", lambda *_: None).findings == []
    with pytest.raises(
        InputError, match=rf"is a fork, and has only its own calls: give .*{session}"
    ):
        Record.of(folder / "forks", forks[0].session_id)

    ended = run_rolltap(*line, "--harness", "newer.toml", cwd=folder)
    assert ended.returncode == 1
    assert "have no reward (3 diverged)" in ended.stderr
    diverged = [
        each for each in rolltap.open_run(folder / "forks").sessions() if each.status == "diverged"
    ]
    assert len(diverged) == 3
    assert all(
        each.error.startswith("diverged at call 1: the message is another one (message 1)")
        for each in diverged
    )
    assert all("Task t. Be quick." in each.error for each in diverged)
    assert "diverged" not in RERUN  # nor by the next start
    kinds = [event["kind"] for event in read_rows(folder / "forks", "events")]
    assert kinds.count("session_started") == 6


def test_the_gradient_of_a_group_of_forks_is_that_of_their_own_tokens_by_the_formula(
    forked, tokenizer, tmp_path
):
    _, run, given = forked  # not the rows, but what the engine was asked and has sampled
    batch = run.traces().batch()
    model = tiny_model(vocab_size=len(tokenizer))
    found = gradients(model, tmp_path, batch, groups_per_step=1, epsilon=1e9, epsilon_high=1e9)

    # a fork is two calls, the second after the first; its last reply is its reward
    forks = [
        (one, two)
        for one in given
        for two in given
        if two[0][: len(one[0] + one[1])] == one[0] + one[1]
    ]
    assert sorted(call for fork in forks for call in fork) == sorted(given)
    assert len(forks) == 3
    rewards = [float(text) for _, (_, _, text) in forks]
    mean, deviation = fmean(rewards), stdev(rewards) + 1e-4  # as in TRL
    loss = torch.zeros(())
    for fork, reward in zip(forks, rewards, strict=True):
        for prompt, reply, _ in fork:
            ids = torch.tensor([prompt + reply])
            every = (
                model(input_ids=ids)
                .logits[0, :-1]
                .log_softmax(-1)
                .gather(-1, ids[0, 1:, None])[:, 0]
            )
            logprobs = -0.125 * (1 + torch.arange(len(reply)) % 5)  # of the scripted engine
            loss -= (
                (every[len(prompt) - 1 :] - logprobs).exp() * (reward - mean) / deviation
            ).sum()
    (loss / sum(len(reply) for _, reply, _ in given)).backward()
    assert (
        relative_difference({name: weight.grad for name, weight in model.named_parameters()}, found)
        < 1e-5
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (["--at", "4"], "has 3 completed calls, and no call 4"),
        (["--at", "0"], "has 3 completed calls, and no call 0"),
        (["--at", "xyz"], "has no completed call 'xyz'"),
        (["--tasks", "other.jsonl"], "other.jsonl has no task 't', which is that of session"),
    ],
)
def test_a_call_or_a_task_that_is_not_there_is_refused(recorded, changes, why, monkeypatch):
    folder, session, options = recorded
    monkeypatch.chdir(folder)
    (folder / "other.jsonl").write_text((folder / "all.jsonl").read_text().partition("\n")[0])
    line = [
        "fork",
        "run",
        session,
        "--at",
        "1",
        "--out",
        "new",
        "--harness",
        "own.toml",
        *map(str, options),
        *changes,
    ]
    result = CliRunner().invoke(command, line)
    assert isinstance(result.exception, RolltapError)
    assert why in str(result.exception)
    assert not (folder / "new").exists()


def test_a_session_of_a_preset_of_ones_own_needs_the_file_of_the_preset(recorded, monkeypatch):
    folder, session, options = recorded
    monkeypatch.chdir(folder)
    line = ["fork", "run", session, "--at", "1", "--out", "new", *map(str, options)]
    result = CliRunner().invoke(command, line)
    assert "'own' is not one of rolltap's: give its file with --harness" in str(result.exception)
    assert not (folder / "new").exists()
