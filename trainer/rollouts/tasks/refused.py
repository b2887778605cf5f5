"""Tasks of a source of many that cannot be had: the others are used, and these are counted."""

import re
from collections import defaultdict
from collections.abc import Sequence

from rolltap.addons.errors import InputError

_REASONS = 3
_OWN = re.compile(r"'[^']*'|\S*[/\d]\S*")  # of one task: names, numbers and paths in a message


class RefusedError(InputError):
    """A task of somebody else's making that cannot be had: a row of a dataset, or a Harbor folder."""


def describe_refused(errors: Sequence[Exception], total: int) -> str:
    """Return how many of `total` tasks are refused, and the most frequent reasons: the count and first one of each."""
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for message in map(str, errors):
        alike[_OWN.sub("", message)].append(message)
    counted = sorted(alike.values(), key=len, reverse=True)
    reasons = [f"{len(messages)} x {messages[0]}" for messages in counted[:_REASONS]]
    if len(counted) > _REASONS:
        reasons.append(f"{sum(map(len, counted[_REASONS:]))} x other reasons")
    return f"{len(errors)} of {total} tasks are refused: {'; '.join(reasons)}"
