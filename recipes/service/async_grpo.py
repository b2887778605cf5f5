"""TRL's experimental AsyncGRPOTrainer (TRL 1.16) on groups of a rollout service.

README.md has the commands. The trainer counts its weights from 1; the service has them as versions
`RUN.STEP.0`. RUN is drawn at each start, because a training that begins again has other weights.
"""

import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from torch.distributed.tensor import DTensor
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

import rolltap
from rolltap.errors import InputError, ServiceError
from rolltap.types import GroupView

STEPS = {"max_steps": 3, "per_device_train_batch_size": 16, "token_budget": -1}
GRADIENT_DESCENT = {"optim": "sgd", "learning_rate": 60, "max_grad_norm": 0.005}


def make_trainer(
    url: str, token_file: str, out: str, sessions: int = 16, **settings: object
) -> AsyncGRPOTrainer:
    """Return a trainer of an adapter on the tasks of a service, which publishes it there after each
    step."""
    client = rolltap.Client(url, token_file=token_file)
    service = client.service()
    tasks = [*service["tasks"]]
    publisher = rolltap.AdapterPublisher(client, Path(out, "adapters"))
    trainer = AsyncGRPOTrainer(
        service["model"],
        args=AsyncGRPOConfig(out, **STEPS | GRADIENT_DESCENT | settings),
        train_dataset=Dataset.from_dict({"prompt": tasks}),
        peft_config=LoraConfig(r=8, lora_alpha=64, target_modules="all-linear"),
        rollout_worker=ServiceRollouts(client, tasks, sessions=sessions, ahead=1),
        weight_transfer=LoraTransfer(
            publisher, lambda: trainer.accelerator.unwrap_model(trainer.model)
        ),
    )
    return trainer


class ServiceRollouts:
    """TRL's `RolloutWorkerProtocol` on a rollout service, whose run folder must be readable here.

    The `tasks` are rolled out in turn, `sessions` times each. At most `ahead` groups are on their
    way: their sessions run, or the trainer has not taken all of their samples. Traces are cut off
    after `max_tokens`, which should be the trainer's `token_budget`. The trainer's `temperature`
    must be the service's. Samples have no messages.
    """

    def __init__(
        self,
        client: rolltap.Client,
        tasks: Sequence[str],
        *,
        sessions: int = 8,
        ahead: int = 4,
        max_tokens: int | None = None,
    ) -> None:
        if not tasks:
            raise InputError(
                "tasks is empty: give ids of the service's tasks, as `client.service()` has them"
            )
        self.rollout_buffer: Queue[Any] = _Samples()
        self.metrics_queue: Queue[dict[str, Any]] = Queue()
        self._client = client
        self._sessions = sessions
        self._max_tokens = max_tokens
        self._numbered = enumerate(cycle(tasks))
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(ahead)]
        self._places = threading.Semaphore(ahead)
        """Groups that may be submitted."""
        self._lock = threading.Lock()
        """Held while a group is submitted, so that `stop` knows all of them."""
        self._running: set[str] = set()
        self._stopped = False
        self._failure: Exception | None = None
        self._ill_since: float | None = None

    def start(self) -> None:
        """Begin to submit groups. Raises `InputError` when `LoraTransfer` has not published the
        service's policy."""
        version = self._client.policy().version
        try:
            self._run, _ = parse(version)
        except ValueError:
            advice = "give the trainer a LoraTransfer as weight_transfer"
            raise InputError(f"the service's policy is {version!r}: {advice}") from None
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Cancel the groups that run."""
        with self._lock:
            self._stopped = True
        for group in [*self._running]:
            with suppress(ServiceError):
                self._client.cancel(group)
        self._places.release(len(self._threads))
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def update_model_version(self, model_version: int) -> None:
        """Do nothing: every token has the version that sampled it."""

    def check_health(self, stale_after_s: float) -> None:
        """Raise the error that ended the work, or `ServiceError` when the service has been unwell
        for so long."""
        if self._failure is not None:
            raise self._failure
        health = self._client.health()
        self._ill_since = None if health["ok"] else self._ill_since or time.monotonic()
        if self._ill_since is not None and time.monotonic() - self._ill_since >= stale_after_s:
            raise ServiceError(
                f"the service at {self._client.url} is not well: {'; '.join(health['problems'])}"
            )

    def _work(self) -> None:
        try:
            while self._roll_out():
                pass
        except Exception as error:  # the trainer's thread raises it
            self._failure = error

    def _roll_out(self) -> bool:
        """Roll out a group when there is a place for it. Return False after `stop`."""
        self._places.acquire()
        with self._lock:
            if self._stopped:
                return False
            number, task = next(self._numbered)
            group = self._client.submit(task, sessions=self._sessions)
            self._running.add(group.id)
        group = self._client.wait(group.id)
        self._running.remove(group.id)
        if self._stopped:
            return False
        samples = self._samples(group, number)
        for sample in samples[:-1]:
            self.rollout_buffer.put((sample, None))
        for sample in samples[-1:]:
            self.rollout_buffer.put((sample, self._places.release))
        if not samples:
            self._places.release()
        return True

    def _samples(self, group: GroupView, number: int) -> list[RolloutSample]:
        """Return the samples of a group that has ended, one for each trace, and put its metrics
        into their queue.

        Advantages are those of TRL's own worker, with the deviation of the population.
        """
        traces = rolltap.open_run(group.run).traces(max_tokens=self._max_tokens)
        batch = traces.batch([session.session_id for session in group.sessions])
        rewards = {session: labelled.reward for session, labelled in batch.rewards.items()}
        values = np.array([*rewards.values()] or [0.0])
        metrics = {"rollout/sampled_tokens_total": float(batch.ledger.sampled)}
        for reason, tokens in batch.ledger.left_out.items():
            metrics[f"rollout/left_out_{reason}_total"] = float(tokens)
        self.metrics_queue.put(
            {"rollout/reward_mean": (sum(rewards.values()), len(rewards)), **metrics}
        )
        samples = []
        for trace in batch.traces:
            steps = []
            for span in trace.weight_versions:
                if not span.version.startswith(f"{self._run}."):
                    raise InputError(
                        f"{trace.trace_id}: another training publishes to the service too: stop one"
                    )
                steps.append(parse(span.version)[1])
            context = len(trace.prompt_ids)
            reward = rewards[trace.session_id]
            sample = RolloutSample(
                prompt=[],
                completion=[],
                input_ids=np.array(trace.prompt_ids + trace.completion_ids, np.int64),
                completion_mask=np.array([0] * context + trace.completion_mask, np.int64),
                old_log_probs=np.array([0.0] * context + trace.logprobs, np.float32),
                advantage=float((reward - values.mean()) / (values.std() + 1e-8)),
                model_version=min(steps),
                group_id=number,
                metrics={"reward": reward, "reward_std": float(values.std())},
                enqueued_at=time.time(),
            )
            samples.append(sample)
        return samples


class _Samples(Queue[Any]):
    """A queue of samples, each with a function that is called when it is taken, or None."""

    def _get(self) -> Any:
        sample, taken = super()._get()
        if taken is not None:
            taken()
        return sample


class LoraTransfer:
    """TRL's `WeightTransferProtocol` by LoRA adapters. `model` returns the trainer's unwrapped
    model."""

    def __init__(self, publisher: rolltap.AdapterPublisher, model: Callable[[], Any]) -> None:
        self._publisher = publisher
        self._model = model
        self._run = secrets.token_hex(4)
        self._step = 0

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]] | None = None) -> None:
        """Publish the adapter of the model. `iterator` has the weights that it is merged into: they
        are left alone.

        Raises as `AdapterPublisher.publish`, and `InputError` for sharded parameters.
        """
        model = self._model()
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise InputError(
                "the model's parameters are sharded: publish with one process, or with DDP"
            )
        self._publisher.publish(model, f"{self._run}.{self._step + 1}.0")
        self._step += 1

    def init_weight_transfer(self) -> None:
        """Do nothing, as `pause`, `resume` and `destroy`."""

    pause = resume = destroy = init_weight_transfer


def parse(version: str) -> tuple[str, int]:
    """Return the run and the step of a version that `LoraTransfer` published. Raises `ValueError`
    for another."""
    run, step, _ = version.split(".")
    return run, int(step)


if __name__ == "__main__":
    make_trainer(*sys.argv[1:]).train()
