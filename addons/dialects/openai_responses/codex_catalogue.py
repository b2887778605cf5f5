"""The catalogue of models that Codex asks chatgpt.com for when it has an API key.

Codex takes its default model, its tools and its idea of the context window from there. OpenAI does not document the
format; the fields below are those without which Codex 0.169 refuses the catalogue, and those that choose its tools.
"""

from typing import Any

from rolltap.addons.dialects.types import ServedModel

_LONGEST_TOOL_OUTPUT = 10_000
"""Tokens; what Codex's own catalogue says."""
_INSTRUCTIONS = (
    "You are Codex, a coding agent in the user's terminal. Work in the current directory with the tools that you have. "
    "Look before you change anything, edit files with shell commands, check what you did, and go on until the task is "
    "done. End with a short account of what you changed."
)
"""Codex keeps the system prompt of a model in its catalogue; what it says about its skills and the environment comes
after it."""


def catalogue(models: list[ServedModel]) -> dict[str, Any]:
    """The catalogue with `models`, the first of them Codex's default."""
    return {"models": [_entry(model, priority) for priority, model in enumerate(models)]}


def _entry(model: ServedModel, priority: int) -> dict[str, Any]:
    return {
        "slug": model.name,
        "display_name": model.name,
        "priority": priority,
        "visibility": "list",
        "supported_in_api": True,
        "context_window": model.context,
        # Codex would wait until the window is almost full; a model that reasons before its summary needs more room.
        "auto_compact_token_limit": model.context * 3 // 4,
        # Codex takes four bytes for a token, and a digit may be one: the share is small, so that one output still fits.
        "truncation_policy": {"mode": "tokens", "limit": min(_LONGEST_TOOL_OUTPUT, model.context // 8)},
        "input_modalities": ["text"],
        "base_instructions": _INSTRUCTIONS,
        # Functions only: a shell, no freeform apply_patch (there is none without `apply_patch_tool_type`), no
        # namespaces of sub-agents.
        "shell_type": "unified_exec",
        "experimental_supported_tools": [],
        "multi_agent_version": "disabled",
        "use_responses_lite": False,
        "supports_parallel_tool_calls": True,
        "supported_reasoning_levels": [],
        "support_verbosity": False,
    }
