"""The parts for TRL's AsyncGRPOTrainer on a real service. `test_service.py` trains with them."""

from itertools import count

import numpy as np
import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import rolltap
from rolltap.errors import InputError, ServiceError
from rolltap.trainer.engine.admin import EngineAdmin
from tests.recipes.test_service import page
from tests.scripted_engine import Answer, Say, ScriptedEngine
from tests.trainer.service.served import TWO_CALLS, program, serving
from tests.trainer.training.step.tiny import tiny_model

FIRST = "0123abcd.1.0"
PAGE = page("async_grpo")


@pytest.fixture(scope="module")
def scripted(tokenizer):
    with ScriptedEngine(tokenizer) as scripted:
        yield scripted


@pytest.fixture(scope="module")
def client(scripted, tokenizer_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("service")
    harness = program(folder, TWO_CALLS)
    limit = ["--concurrency", "1"]
    with serving(folder / "run", scripted.url, tokenizer_folder, harness, *limit) as service:
        yield rolltap.Client(service.url, service.token)


@pytest.fixture
def worker(client, scripted):
    """Return a worker that has not started. Of four calls of the policy's version one is bad."""
    sampled = count()
    scripted.loop.call_soon_threadsafe(scripted._released.clear)

    def answer(request):
        return Say("bad." if next(sampled) % 4 == 2 else "good.", weight_version=FIRST)

    scripted.otherwise = answer
    scripted.weight_version = FIRST
    client.policy(FIRST)
    worker = PAGE.ServiceRollouts(client, ["words"], sessions=2, ahead=1)
    yield worker
    worker.stop()
    scripted.release()
    for group in accepted(client):
        client.wait(group, timeout=600)


def take(worker, number):
    return [worker.rollout_buffer.get(timeout=600) for _ in range(number)]


def accepted(client):
    """Return the ids of the groups that have been accepted up to now: before one that is submitted
    here."""
    marker = client.submit("words", sessions=1)
    client.cancel(marker.id)
    ids = []
    for event in client.events():
        if event.kind == "accepted":
            if event.data["id"] == marker.id:
                return ids
            ids.append(event.data["id"])


def test_samples_have_the_tokens_and_the_advantages_of_the_group_s_traces(worker, client):
    worker.start()
    samples = take(worker, 1)
    view = client.get(accepted(client)[-1])
    samples += take(worker, 1)
    batch = rolltap.open_run(view.run).traces().batch(view.session_ids)
    assert len(batch.traces) == len(samples)
    for trace, sample in zip(batch.traces, samples, strict=True):
        assert sample.input_ids.tolist() == trace.prompt_ids + trace.completion_ids
        prompt = len(trace.prompt_ids)
        assert sample.completion_mask.tolist() == [0] * prompt + trace.completion_mask
        assert sample.old_log_probs.tolist() == [0.0] * prompt + trace.logprobs
        assert (sample.input_ids.dtype, sample.old_log_probs.dtype) == (np.int64, np.float32)
        reward = batch.rewards[trace.session_id].reward
        assert (sample.metrics["reward"], sample.metrics["reward_std"]) == (reward, 0.5)
        assert sample.advantage == pytest.approx(2 * reward - 1)
        assert (sample.group_id, sample.model_version) == (0, 1)
    assert {sample.metrics["reward"] for sample in samples} == {0.0, 1.0}
    metrics = worker.metrics_queue.get(timeout=600)
    assert metrics == {
        "rollout/reward_mean": (1.0, 2),
        "rollout/sampled_tokens_total": batch.ledger.sampled,
    }
    assert batch.ledger.sampled == sum(sample.completion_mask.sum() for sample in samples)


def test_a_sample_is_as_old_as_its_oldest_token(worker, scripted, tokenizer):
    def answer(request):
        step = 3 if "And?" in tokenizer.decode(request["token_ids"]) else 2
        return Say("good.", weight_version=f"0123abcd.{step}.0")

    scripted.otherwise = answer
    worker.start()
    for sample in take(worker, 2):
        assert sample.model_version == 2
        assert sample.completion_mask.sum() > len(scripted.ids("good."))


def test_tokens_of_another_training_s_weights_are_refused(worker, scripted):
    scripted.otherwise = lambda _: Say("good.", weight_version="ffffffff.1.0")
    worker.start()
    for thread in worker._threads:
        thread.join()
    with pytest.raises(InputError, match="another training publishes to the service too"):
        worker.check_health(300.0)


def test_no_group_is_submitted_before_the_samples_of_the_one_before_are_taken(worker, client):
    worker.start()
    take(worker, 1)
    own = accepted(client)[-1]
    assert client.get(own).state == "ended"
    take(worker, 1)
    assert {sample.group_id for sample in take(worker, 2)} == {1}


def test_stopping_cancels_the_groups_that_run(worker, client, scripted):
    scripted.otherwise = lambda _: Say("good.", hold_after=1)
    worker.start()
    assert scripted.holding.wait(600)
    group = accepted(client)[-1]
    worker.stop()
    assert client.wait(group, timeout=600).state == "cancelled"


def test_a_service_that_is_not_well_for_so_long_is_an_error(worker, scripted):
    worker.start()
    worker.check_health(0.0)
    scripted.answers["/health"] = Answer(500, "")
    try:
        worker.check_health(300.0)
        with pytest.raises(ServiceError, match=r"is not well: the engine at .* does not answer"):
            worker.check_health(0.0)
    finally:
        del scripted.answers["/health"]
    worker.check_health(0.0)


def test_without_a_published_policy_it_does_not_start(worker, client, scripted):
    scripted.weight_version = "default"
    client.policy("default")
    with pytest.raises(InputError, match="policy is 'default': give the trainer a LoraTransfer"):
        worker.start()
    with pytest.raises(InputError, match="tasks is empty"):
        PAGE.ServiceRollouts(client, [])


def test_a_model_without_a_lora_adapter_is_refused_and_the_policy_stays(client, tmp_path):
    policy = client.policy()
    publisher = rolltap.AdapterPublisher(client, tmp_path / "adapters")
    transfer = PAGE.LoraTransfer(publisher, tiny_model)
    with pytest.raises(InputError, match="the model has no LoRA adapter"):
        transfer.send_weights()
    assert client.policy() == policy


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_is_the_policy_and_the_newest_ones_stay_loaded(engine, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(engine.model_dir)
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear"))
    admin = EngineAdmin(engine.url)
    with serving(tmp_path / "run", engine.url, engine.model_dir, program(tmp_path)) as service:
        client = rolltap.Client(service.url, service.token)
        publisher = rolltap.AdapterPublisher(client, tmp_path / "adapters", adapters=1)
        transfer = PAGE.LoraTransfer(publisher, lambda: model)
        try:
            published = [transfer.send_weights(iter(())) or client.policy() for _ in range(2)]
            assert admin.models().adapters == {published[1].model}
            view = client.wait(client.submit("words", sessions=1).id, timeout=600)
        finally:
            for name in admin.models().adapters:
                admin.unload_adapter(name)
    first, second = (policy.version for policy in published)
    assert PAGE.parse(second) == (PAGE.parse(first)[0], 2)
    assert view.sessions[0].policy_version == second
    assert [folder.name for folder in (tmp_path / "adapters").iterdir()] == [published[1].model]
