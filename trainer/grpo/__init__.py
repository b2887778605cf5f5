"""The torch room: trains on traces.

`TraceGRPOTrainer` is imported on first use, as torch and TRL take seconds.
"""

from typing import Any

__all__ = ["TraceGRPOTrainer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rolltap.trainer.grpo import trainer

    return getattr(trainer, name)
