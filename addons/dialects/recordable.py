"""The part of a request's options that a run folder may hold: numbers, flags and short words.

Options are free JSON. A harness may put a secret or a personal text anywhere in them, for instance the `authorization`
of an MCP server.
"""

import json
import re
from collections.abc import Collection
from typing import Any

_WORD = re.compile(r"[\w.:/+-]{0,32}", re.ASCII)
"""Names of an API, for instance `web_search_20250305`. The keys and tokens that services issue are longer."""
_ORIGIN = re.compile(r"(https?|wss?)://(?:[^/?#]*@)?([\w.-]{1,253}(?::\d{1,5})?)(?=[/?#]|$)", re.ASCII)
"""Scheme, and host with port, of a URL."""
_LONGEST = 4096
"""Characters of an option as JSON."""
_DEEPEST = 8
_MOST_TOOLS = 64
_APPLIED = frozenset({"schema", "responseSchema", "responseJsonSchema"})
"""Options with a JSON schema. One that is applied is recorded with the applied parameters."""
_URLS = frozenset({"server_url", "url"})
_TOOL_KEYS = _URLS | {
    # all APIs
    *("type", "name", "enabled", "environment", "filters", "strict"),
    # MCP
    *("server_label", "connector_id", "mcp_server_name", "tool_configuration", "allowed_tools", "tool_names"),
    *("read_only", "require_approval", "always", "never", "defer_loading", "allowed_callers"),
    # search, files, computer
    *("max_uses", "max_num_results", "max_characters", "max_content_tokens", "allowed_domains", "blocked_domains"),
    *("search_context_size", "external_web_access", "display_width_px", "display_height_px", "display_number"),
    # Google: kinds of tools, and their fields
    *("googleSearch", "googleSearchRetrieval", "enterpriseWebSearch", "googleMaps", "urlContext", "codeExecution"),
    *("computerUse", "fileSearch", "retrieval", "mcpServers", "streamableHttpTransport", "excludeDomains", "topK"),
}
"""Fields of hosted tools that hold no secret."""


def recordable(options: dict[str, Any], names: Collection[str] = ()) -> dict[str, Any]:
    """Return options of a request as they are recorded. `names` are texts that may be recorded: the tools' names.

    Other texts than short words become their number of characters, as does an option of more than `_LONGEST`. JSON
    schemas are left out.
    """
    return {key: _bounded(_cleaned(value, names, None)) for key, value in options.items() if key not in _APPLIED}


def recordable_tools(tools: list[dict[str, Any]]) -> list[Any]:
    """Return hosted tools as they are recorded: their known fields, and the names of the others under `left_out`.

    Of more than `_MOST_TOOLS` tools, the others become their number. Of a URL, only scheme, host and port are kept:
    user, path and query may be secret.
    """
    recorded = [_bounded(_cleaned(tool, (), _TOOL_KEYS)) for tool in tools[:_MOST_TOOLS]]
    return recorded if len(tools) <= _MOST_TOOLS else [*recorded, f"({len(tools) - _MOST_TOOLS} more)"]


def is_word(text: str) -> bool:
    """Return True for a text that may be recorded from any place of a request."""
    return _WORD.fullmatch(text) is not None


def described(value: Any) -> str:
    """Return a value for an error message, which is recorded: a short word in quotes, or the kind of value it is."""
    if isinstance(value, str):
        return repr(value) if is_word(value) else f"a text of {len(value)} characters"
    return {dict: "an object", list: "a list", bool: "a boolean", type(None): "null"}.get(type(value), "a number")


def _cleaned(value: Any, names: Collection[str], keys: Collection[str] | None, depth: int = 0) -> Any:
    """Return a value without texts that are not short words. With `keys`, objects keep those fields only."""
    if depth > _DEEPEST:
        return "(deeper)"
    if isinstance(value, str):
        return value if value in names else _short(value)
    if isinstance(value, list):
        return [_cleaned(inner, names, keys, depth + 1) for inner in value]
    if not isinstance(value, dict):
        return value
    left_out = [_short(key) for key in value if keys is not None and key not in keys]
    kept = {
        _short(key): _origin(inner) if keys and key in _URLS else _cleaned(inner, names, keys, depth + 1)
        for key, inner in value.items()
        if key not in _APPLIED and (keys is None or key in keys)
    }
    return {**kept, "left_out": left_out} if left_out else kept


def _bounded(value: Any) -> Any:
    length = len(json.dumps(value))
    return value if length <= _LONGEST else f"({length} characters)"


def _short(text: str) -> str:
    return text if is_word(text) else f"({len(text)} characters)"


def _origin(url: Any) -> str:
    """Return `scheme://host:port` of a URL."""
    found = _ORIGIN.match(url) if isinstance(url, str) else None
    return f"{found[1]}://{found[2]}" if found else "(no URL)"
