"""The weights of tokens whose stream broke: vLLM names base weights only on the last event of a request."""

from rolltap.addons.engine.policy import UNPUBLISHED, Policy
from rolltap.addons.store.records import Call, VersionSpan


class LostVersions:
    """The tokens of one call that a failed request to the base model has left without the name of their weights.

    Where the published policy names them, that is taken. Without one, they are named by what the engine had said before
    (`Engine.weight_version`), if the next request of the call says the same of its first token. Otherwise the spans
    keep a gap, which `find_violation` reports: the call is not trained on.
    """

    def __init__(self) -> None:
        self._said: set[str | None] = set()

    def add(self, call: Call, start: int, asked: Policy, published: Policy, said: str | None) -> None:
        """Add the tokens from `start`, sampled by a request that has failed.

        `asked` was the policy of the request, `published` is that of now; `said` are the weights that the engine had
        named before the request.
        """
        covered, end = covered_tokens(call), len(call.completion_ids)
        if covered == end:
            return
        if covered == start and asked == published != UNPUBLISHED:
            call.weight_versions.append(VersionSpan(version=asked.version, start=start, end=end))
        else:
            self._said.add(said if asked == published else None)

    def settle(self, spans: list[VersionSpan], start: int, end: int) -> list[VersionSpan]:
        """Return `spans` and, if the weights of the tokens from `start` to `end` are known, theirs.

        `spans` are of the request that followed, in the order of its tokens.
        """
        known = start < end and self._said == {spans[0].version}
        return [VersionSpan(version=spans[0].version, start=start, end=end), *spans] if known else spans


def covered_tokens(call: Call) -> int:
    """Return the number of tokens whose weights are named."""
    return call.weight_versions[-1].end if call.weight_versions else 0
