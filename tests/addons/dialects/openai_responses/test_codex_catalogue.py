import json

from rolltap.addons.dialects import openai_responses
from rolltap.addons.dialects.model_call import ServedModel

NEEDED = {
    "slug",
    "display_name",
    "priority",
    "visibility",
    "supported_in_api",
    "truncation_policy",
    "base_instructions",
    "shell_type",
    "experimental_supported_tools",
    "supported_reasoning_levels",
    "support_verbosity",
}
"""Required fields: Codex 0.169 rejects the whole catalogue when one is missing."""


def entries(*models):
    body = openai_responses.encode_models("/backend-api/codex/models?client_version=0.169.0", list(models), 5)
    return json.loads(body)["models"]


def test_every_entry_has_the_fields_that_codex_needs():
    (entry,) = entries(ServedModel("tiny", 32768))
    assert entry.keys() >= NEEDED
    assert isinstance(entry["base_instructions"], str)


def test_codex_learns_the_name_and_the_window():
    (entry,) = entries(ServedModel("tiny", 32768))
    assert (entry["slug"], entry["context_window"]) == ("tiny", 32768)
    assert entry["auto_compact_token_limit"] < entry["context_window"]


def test_one_tool_output_does_not_fill_the_window():
    small, large = entries(ServedModel("small", 4096), ServedModel("large", 262144))
    assert small["truncation_policy"] == {"mode": "tokens", "limit": 512}
    assert large["truncation_policy"] == {"mode": "tokens", "limit": 10_000}


def test_the_first_model_is_the_default():
    first, second = entries(ServedModel("a", 4096), ServedModel("b", 4096))
    assert first["priority"] < second["priority"]


def test_codex_is_offered_functions_only():
    (entry,) = entries(ServedModel("tiny", 32768))
    assert not entry["use_responses_lite"]
    assert "apply_patch_tool_type" not in entry
    assert entry["multi_agent_version"] == "disabled"
