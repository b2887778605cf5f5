"""Names of the recorder's options. Imports nothing of mitmproxy, so that a wrong name is refused before it starts."""

import difflib
from collections.abc import Collection, Iterable

from rolltap.addons.errors import InputError

PREFIX = "rolltap_"
"""Begins the names of the recorder's own options. All others are mitmproxy's."""
NAMES = frozenset(
    {
        "rolltap_accept_rewards",
        "rolltap_allow",
        "rolltap_engine",
        "rolltap_engine_key_file",
        "rolltap_fsync",
        "rolltap_images",
        "rolltap_keep_adapter",
        "rolltap_max_calls",
        "rolltap_max_concurrent_calls",
        "rolltap_max_prompt_tokens",
        "rolltap_max_requests_per_minute",
        "rolltap_max_sampled_tokens",
        "rolltap_max_session_bytes",
        "rolltap_model",
        "rolltap_out",
        "rolltap_patience",
        "rolltap_prefix",
        "rolltap_ready",
        "rolltap_renderer",
        "rolltap_sampling",
        "rolltap_secret_file",
        "rolltap_websocket",
    }
)
"""The recorder's own options. A test compares them with those that the addons declare."""


def require_known(names: Iterable[str], where: str = "") -> None:
    """Refuse names that begin with `PREFIX` and are no option. `where` is written before such a name.

    Raises `InputError`, which says the nearest known name.
    """
    for name in names:
        if name.startswith(PREFIX) and name not in NAMES:
            raise InputError(where + unknown(name, NAMES))


def unknown(name: str, known: Collection[str]) -> str:
    """Return the refusal of a name, with the nearest of the `known` ones."""
    (nearest,) = difflib.get_close_matches(name, sorted(known), 1, 0)
    return f"{name} is no option of the recorder: did you mean {nearest}?"
