"""The two sizes of the suite. The deep one has every case; the short one has one case of each kind,
and every property.

`tests/run.sh --deep` sets `ROLLTAP_DEEP`. What has the mark `deep` runs there only; another test
covers its property.
"""

import os
from collections.abc import Iterable

from hypothesis import settings

DEEP = bool(os.environ.get("ROLLTAP_DEEP"))
SHORT_EXAMPLES = 40
"""Examples of a property in the short suite, always the same ones."""


def examples(number: int, **others) -> settings:
    """Return the settings of a property with `number` examples in the deep suite."""
    return settings(
        max_examples=number if DEEP else min(number, SHORT_EXAMPLES),
        deadline=None,
        derandomize=not DEEP,
        **others,
    )


def cases(every: Iterable, *short: int) -> list:
    """Return all cases in the deep suite, and those at the places `short` otherwise: the first
    without any."""
    found = list(every)
    return found if DEEP else [found[i] for i in short or (0,)]


settings.register_profile("suite", examples(100))
settings.load_profile("suite")
