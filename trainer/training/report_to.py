"""The reporters of a training: programs to which TRL's trainer sends its metrics."""

from typing import Any

from transformers import integrations

from rolltap.addons.errors import InputError

_EXTRAS = {
    "tensorboard": integrations.is_tensorboard_available,
    "trackio": integrations.is_trackio_available,
    "wandb": integrations.is_wandb_available,
}
"""Reporters that are extras of this package -> whether they are installed."""


def check_report_to(value: Any) -> None:
    """Raise `InputError` for a `report_to` with a reporter that does not exist or is not installed.

    `value` is a name, a list of names, `none`, or `all` for the reporters that are installed.
    """
    names = [value] if isinstance(value, str) else value
    if names in (["none"], ["all"]):
        return
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"grpo.report_to = {value!r}: give a name or a list of names")
    for name in names:
        if name not in integrations.INTEGRATION_TO_CALLBACK:
            choices = ", ".join(_EXTRAS)
            raise InputError(
                f"grpo.report_to = {value!r}: there is no reporter {name!r}; choose from {choices}, or 'none' alone"
            )
        if name in _EXTRAS:
            if not _EXTRAS[name]():
                raise InputError(f"grpo.report_to = {name!r}: it is not installed: pip install 'rolltap[{name}]'")
        elif name not in integrations.get_available_reporting_integrations():
            raise InputError(
                f"grpo.report_to = {name!r}: it is not installed or not configured; transformers' documentation of "
                "callbacks says what it needs"
            )
