"""Parts for TRL's experimental AsyncGRPOTrainer (TRL 1.16): groups from a rollout service, and adapters back to it.

    worker = ServiceRollouts(client, tasks)
    transfer = LoraTransfer(client, folder, base, lambda: trainer.accelerator.unwrap_model(trainer.model))
    trainer = AsyncGRPOTrainer(base, peft_config=..., rollout_worker=worker, weight_transfer=transfer, ...)

The trainer counts its weights from 1; the service has them as `Version`s whose step is that number. Their run is drawn
at each start, since a training that begins again begins at 1 with other weights.

The trainer refuses models with layers of linear attention or state spaces (hybrids, as Qwen3.5) or attention sinks.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import cycle
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
from torch import Tensor
from torch.distributed.tensor import DTensor
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from rolltap.addons.errors import InputError, ServiceError
from rolltap.trainer.engine.engines import Engines
from rolltap.trainer.engine.publish import LoraPublisher
from rolltap.trainer.names import Version
from rolltap.trainer.service.client import Client, finish
from rolltap.trainer.service.requests import GroupView
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.sessions import TraceOptions, load_batch


class ServiceRollouts:
    """TRL's `RolloutWorkerProtocol` on a rollout service, whose run folder must be readable here.

    The `tasks` are rolled out in turn, `sessions` times each. At most `ahead` groups are on their way: their sessions
    run, or the trainer has not taken all of their samples. Traces are cut off after `max_tokens`, if it is not 0, which
    should be the trainer's `token_budget`. The trainer's `temperature` must be the service's. Samples have no messages.
    """

    def __init__(
        self, client: Client, tasks: Sequence[str | Task], *, sessions: int = 8, ahead: int = 4, max_tokens: int = 0
    ) -> None:
        if not tasks:
            raise InputError("tasks is empty: give ids of the service's tasks, as `client.service()` has them")
        self.rollout_buffer: Queue[Any] = _Samples()
        self.metrics_queue: Queue[dict[str, Any]] = Queue()
        self._client, self._sessions, self._ahead = client, sessions, ahead
        self._numbered = enumerate(cycle(tasks))
        self._options = TraceOptions(max_tokens=max_tokens or None)
        self._work: list[asyncio.Task[None]] = []
        self._ill_since: float | None = None

    def start(self) -> None:
        """Begin to submit groups. Raises `InputError` when `LoraTransfer` has not published the service's policy."""
        version = self._client.policy().version
        if (published := Version.parse(version)) is None:
            raise InputError(f"the service's policy is {version!r}: give the trainer a LoraTransfer as weight_transfer")

        async def begin() -> None:
            self._work = [asyncio.create_task(self._roll_out(published)) for _ in range(self._ahead)]

        finish(begin())

    def stop(self) -> None:
        """Cancel the groups that run."""

        async def end() -> None:
            for work in self._work:
                work.cancel()
            await asyncio.gather(*self._work, return_exceptions=True)

        finish(end())

    def update_model_version(self, model_version: int) -> None:
        """Do nothing: every token has the version that sampled it."""

    def check_health(self, stale_after_s: float) -> None:
        """Raise the error that ended the work, or `ServiceError` when the service has been unwell for so long."""
        for work in self._work:
            if work.done():
                work.result()
        health = self._client.health()
        self._ill_since = None if health["ok"] else self._ill_since or time.monotonic()
        if self._ill_since is not None and time.monotonic() - self._ill_since >= stale_after_s:
            raise ServiceError(f"the service at {self._client.url} is not well: {'; '.join(health['problems'])}")

    async def _roll_out(self, published: Version) -> None:
        """Roll out one group after the other, each when all samples of the one before have been taken."""
        client, loop = self._client.asynchronous, asyncio.get_running_loop()
        for number, task in self._numbered:
            name = secrets.token_hex(16)
            try:
                await client.submit(task, sessions=self._sessions, id=name)
                group = await client.wait(name)
            except asyncio.CancelledError:
                with suppress(ServiceError):
                    await client.cancel(name)
                raise
            samples = await asyncio.to_thread(self._samples, group, number, published)
            taken = asyncio.Semaphore(0)
            for sample in samples:
                self.rollout_buffer.put((sample, partial(loop.call_soon_threadsafe, taken.release)))
            for _ in samples:
                await taken.acquire()

    def _samples(self, group: GroupView, number: int, published: Version) -> list[RolloutSample]:
        """Return the samples of a group that has ended, one for each trace, and put its metrics into their queue.

        Advantages are those of TRL's own worker, with the deviation of the population.
        """
        batch = load_batch(Path(group.run), [session.session_id for session in group.sessions], self._options)
        rewards = {session: labelled.reward for session, labelled in batch.rewards.items()}
        values = np.array([*rewards.values()] or [0.0])
        tokens = {"sampled_tokens": batch.ledger.sampled}
        tokens |= {f"left_out_{reason}": number for reason, number in batch.ledger.left_out.items()}
        metrics = {f"rollout/{name}_total": float(number) for name, number in tokens.items()}
        self.metrics_queue.put({"rollout/reward_mean": (sum(rewards.values()), len(rewards)), **metrics})
        samples = []
        for trace in batch.traces:
            ages = [published.age(span.version) for span in trace.weight_versions]
            if None in ages:
                raise InputError(f"{trace.trace_id}: another training publishes to the service too: stop one of them")
            context, reward = len(trace.prompt_ids), rewards[trace.session_id]
            sample = RolloutSample(
                prompt=[],
                completion=[],
                input_ids=np.array(trace.prompt_ids + trace.completion_ids, np.int64),
                completion_mask=np.array([0] * context + trace.completion_mask, np.int64),
                old_log_probs=np.array([0.0] * context + trace.logprobs, np.float32),
                advantage=float((reward - values.mean()) / (values.std() + 1e-8)),
                model_version=min(published.step - age for age in ages if age is not None),
                group_id=number,
                metrics={"reward": reward, "reward_std": float(values.std())},
                enqueued_at=time.time(),
            )
            samples.append(sample)
        return samples


class _Samples(Queue[Any]):
    """A queue into which each sample is put with a function, which is called when it is taken."""

    def _get(self) -> Any:
        sample, taken = super()._get()
        taken()
        return sample


class LoraTransfer:
    """TRL's `WeightTransferProtocol` by LoRA adapters: files that the engines load, which then are the policy.

    The adapters are written to `folder`, which the engines must see under the same path. `base` is the folder of the
    model that they serve, and `model` returns the trainer's unwrapped one. The newest `adapters` stay loaded, for
    sessions that began with them. Calls in flight go on: nothing is paused.
    """

    def __init__(
        self, client: Client, folder: str | Path, base: str | Path, model: Callable[[], Any], *, adapters: int = 2
    ) -> None:
        self._client, self._model = client, model
        engines = Engines(client.service()["engine"])
        self._publisher = LoraPublisher(engines, folder=Path(folder), run=None, base=Path(base), adapters=adapters)
        self._published = Version(secrets.token_hex(4), 0, 0)

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]] | None = None) -> None:
        """Publish the adapter of the model. The weights of `iterator`, which it is merged into, are left alone.

        Raises `InputError` for a model without a LoRA adapter, or with sharded parameters, and `EngineError` and
        `ServiceError`: the policy is as before then.
        """
        model = self._model()
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise InputError("the model's parameters are sharded: publish with one process, or with DDP")
        new = Version(self._published.run, self._published.step + 1, 0)

        def set_policy(name: str | None) -> None:
            self._client.policy(str(new), name)

        self._publisher.publish(model, str(new), set_policy)
        self._published = new

    def init_weight_transfer(self) -> None:
        """Do nothing, as `pause`, `resume` and `destroy`."""

    pause = resume = destroy = init_weight_transfer
