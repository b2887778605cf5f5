"""New weights for a rollout service, from a trainer that is not rolltap's."""

from pathlib import Path

from peft import PeftModel

from rolltap.trainer.engine.engines import Engines
from rolltap.trainer.engine.publish import LoraPublisher
from rolltap.trainer.service.client import Client


class AdapterPublisher:
    """Publishes the LoRA adapter of a model in training to a rollout service and its engines.

    Adapters are saved below `folder`, which the engines must see under the same path. The newest
    `adapters` stay loaded, for sessions that began with them. Calls in flight go on.
    """

    def __init__(self, client: Client, folder: str | Path, *, adapters: int = 2) -> None:
        service = client.service()
        self._client = client
        self._publisher = LoraPublisher(
            Engines(service["engine"]),
            folder=Path(folder),
            run=None,
            base=Path(service["model"]),
            adapters=adapters,
        )

    def publish(self, model: PeftModel, version: str) -> None:
        """Make the adapter the service's policy, under the name of `version`, which must be new.

        Versions whose names begin alike up to the first dot are of one training: the older adapters
        of it are unloaded and removed. Raises `InputError` for a model without an adapter,
        `RunError` when it cannot be saved, `EngineError` and `ServiceError`. The policy is as
        before then.
        """

        def set_policy(name: str | None) -> None:
            self._client.policy(version, name)

        self._publisher.publish(model, version, set_policy)
