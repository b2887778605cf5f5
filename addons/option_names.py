"""Names and types of the recorder's options, so that a wrong one is refused before the recorder starts."""

import difflib
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from rolltap.addons.errors import InputError

PREFIX = "rolltap_"
"""Begins the names of the recorder's own options. All others are mitmproxy's."""
TYPES: Mapping[str, Any] = MappingProxyType(
    {
        "rolltap_accept_rewards": bool,
        "rolltap_allow": Sequence[str],
        "rolltap_engine": str,
        "rolltap_engine_key_file": str,
        "rolltap_fsync": str,
        "rolltap_images": str,
        "rolltap_keep_adapter": bool,
        "rolltap_max_calls": int,
        "rolltap_max_concurrent_calls": int,
        "rolltap_max_prompt_tokens": int,
        "rolltap_max_requests_per_minute": int,
        "rolltap_max_sampled_tokens": int,
        "rolltap_max_session_bytes": int,
        "rolltap_model": str,
        "rolltap_out": str,
        "rolltap_patience": int,
        "rolltap_prefix": Sequence[str],
        "rolltap_ready": str,
        "rolltap_renderer": str,
        "rolltap_sampling": str,
        "rolltap_secret_file": str,
        "rolltap_websocket": bool,
    }
)
"""The recorder's own options and their types. A test compares them with those that the addons declare."""
_ALIKE = 0.6
"""Least similarity of a name that is taken for another one, as difflib counts it."""


def require_options(options: Mapping[str, str | Sequence[str]], where: str = "") -> None:
    """Refuse options of a recorder that is not started yet: unknown names, and values of another type.

    A repeated option has a list of values. `where` is written before a name. Without mitmproxy, names of its options
    and all values are left to the recorder's start.

    Raises `InputError`, which says the nearest known name.
    """
    for name in options:
        if name.startswith(PREFIX) and name not in TYPES:
            raise InputError(where + unknown(name, TYPES))
    if options and find_spec("mitmproxy") is not None:
        from rolltap.addons.options import refusals

        if refused := refusals({name: [value] if isinstance(value, str) else value for name, value in options.items()}):
            raise InputError("\n".join(where + each for each in refused))


def unknown(name: str, known: Collection[str]) -> str:
    """Return the refusal of a name, with the one of the `known` ones that resembles it, if there is one."""
    # without the prefix: it makes all of them alike
    own = {each.removeprefix(PREFIX): each for each in sorted(known)}
    near = difflib.get_close_matches(name.removeprefix(PREFIX), own, 1, _ALIKE)
    hint = f"did you mean {own[near[0]]}?" if near else "see addons/README.md, and `mitmdump --options`"
    return f"{name} is no option of the recorder: {hint}"
