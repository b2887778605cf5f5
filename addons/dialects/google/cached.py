"""The cached content that a request of the Gemini API names."""

from typing import Any

from rolltap.addons.dialects.fields import Fields
from rolltap.addons.dialects.stored import Stored
from rolltap.addons.dialects.types import DialectError

FOLDER = "/cachedContents/"
"""Start of the paths under which cached contents are stored."""
FIRST = ("systemInstruction", "tools", "toolConfig")
"""Fields of a request that only its cached content may have."""


def with_cached_content(request: Fields, model: str, stored: Stored) -> Fields:
    """Return a request with the cached content that it names in front. Raises `DialectError`."""
    name = request.text("cachedContent")
    cached = find_cached(name, stored)
    if any(request[key] is not None for key in FIRST):
        raise DialectError(
            "CachedContent can not be used with GenerateContent request setting system_instruction, tools or "
            "tool_config. Proposed fix: move those values to CachedContent from GenerateContent request."
        )
    made_for = str(cached.get("model", "")).rpartition("/")[2]
    if made_for and made_for != model:
        raise DialectError("Model used by GenerateContent request and CachedContent has to be the same.")
    contents = [*as_list(cached.get("contents")), *as_list(request["contents"])]
    first = {key: cached[key] for key in FIRST if key in cached}
    return request.replaced({**request.values, **first, "contents": contents})


def find_cached(name: str, stored: Stored) -> dict[str, Any]:
    """Return a cached content as its entries have made it. Raises `DialectError` for one that is unknown."""
    entries = stored.entries(path_of(name))
    if entries is None:
        raise DialectError("CachedContent not found (or permission denied)", status=403)
    return {key: value for entry in entries for key, value in entry.items()}


def path_of(name: str) -> str:
    """Return the path under which a cached content is stored. Its names have a project, or none."""
    return f"{FOLDER}{name.rpartition('/')[2]}"


def as_list(value: Any) -> list[Any]:
    """Return a repeated field, which may be a single message without a list."""
    return value if isinstance(value, list) else [] if value is None else [value]
