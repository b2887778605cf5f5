"""GRPO on recorded traces, with torch and TRL.

`TraceGRPOTrainer` is imported on first use: importing torch and TRL takes seconds.
"""

from typing import Any

__all__ = ["TraceGRPOTrainer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rolltap.trainer.training.grpo import trainer

    return getattr(trainer, name)
