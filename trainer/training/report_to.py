"""The reporters of a training: programs to which TRL's trainer sends its metrics."""

from collections.abc import Sequence

from transformers import integrations

from rolltap.addons.errors import InputError

_EXTRAS = {
    "tensorboard": integrations.is_tensorboard_available,
    "trackio": integrations.is_trackio_available,
    "wandb": integrations.is_wandb_available,
}
"""Reporters that are extras of this package -> whether they are installed."""


def check_report_to(names: str | Sequence[str]) -> None:
    """Raise `InputError` for a reporter that does not exist or is not installed.

    `names` is the value of `report_to`: one name or several, `none`, or `all` for those that are installed.
    """
    for name in [names] if isinstance(names, str) else names:
        if name in ("none", "all"):
            continue
        if name not in integrations.INTEGRATION_TO_CALLBACK:
            choices = ", ".join(["none", *_EXTRAS])
            raise InputError(f"grpo.report_to = {name!r}: there is no such reporter; choose {choices}")
        if name in _EXTRAS:
            if not _EXTRAS[name]():
                raise InputError(f"grpo.report_to = {name!r}: it is not installed: pip install 'rolltap[{name}]'")
        elif name not in integrations.get_available_reporting_integrations():
            raise InputError(
                f"grpo.report_to = {name!r}: it is not installed or not configured; transformers' documentation of "
                "callbacks says what it needs"
            )
