"""Engines."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rolltap.trainer.engine import admin


class Engines:
    def __init__(self, urls: Sequence[str] | str) -> None:
        self.urls = [urls] if isinstance(urls, str) else list(urls)
        self.admins = [admin.EngineAdmin(url) for url in self.urls]

    def require_endpoints(self) -> None:
        for engine in self.admins:
            engine.require_endpoints()

    @contextmanager
    def claimed(self, owner: str, about: str, *, steal: bool = False) -> Iterator[None]:
        yield

    def verify_base(
        self,
        model: Path,
        version: str,
        ids: Sequence[int],
        own: Sequence[float],
        limit: float,
        say: Callable[[str], None],
    ) -> None:
        pass

    def difference(self, name: str | None, ids: Sequence[int], own: Sequence[float]) -> float:
        differences = []
        for engine in self.admins:
            scored = engine.score(name or engine.models().base, ids[:1], ids[1:])
            differences.append(sum(abs(a - b) for a, b in zip(own, scored, strict=True)) / len(own))
        return max(differences)
