"""The table of prompt tokens that engines took from their prefix caches."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from rolltap.trainer.traces.cached import CachedPrompts


@dataclass(frozen=True, slots=True)
class CacheRow:
    """Prompt tokens that the engine took from its prefix cache, of the calls of one kind of one harness."""

    harness: str
    """Empty when it is not known."""
    kind: str
    prompts: CachedPrompts
    share: float | None
    """Cached tokens of a prompt token."""
    unused: bool
    """True when next to nothing of the parents' tokens came from the cache: see `CachedPrompts.unused`."""


def cache_table(rows: Sequence[CacheRow]) -> Table:
    """Return the table, with a caption when a cache is next to unused."""
    table = Table("harness", "prompts", "tokens", "cached", title="prompt tokens from the engine's prefix cache")
    for row in rows:
        share = "" if row.share is None else f"{row.share:.1%}"
        table.add_row(Text(row.harness), row.kind, str(row.prompts.prompt_tokens), share)
    unused = sorted({row.harness or "unknown" for row in rows if row.unused})
    if unused:
        table.caption = Text(
            f"Continued calls ({', '.join(unused)}) take next to nothing from the cache: each turn computes its whole "
            "prompt again. Check that the engine caches prefixes of this model (--enable-prefix-caching), has memory "
            "for them, and that sessions stay on one engine.",
            "red",
        )
    return table
