"""The catalogue of models that Codex asks chatgpt.com for."""

from typing import Any

from rolltap.addons.dialects.model_call import ServedModel


def catalogue(models: list[ServedModel]) -> dict[str, Any]:
    """The catalogue with `models` in it, the first one Codex's default."""
    return {"models": []}
