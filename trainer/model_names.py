"""Names of models as others may read them: without the paths of the machine that has them."""

import re
from pathlib import Path, PurePath

_CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/[0-9a-f]+/?")
"""The end of a model's folder in the cache of huggingface_hub: owner and name."""


def public_model(model: str) -> str:
    """Return a model's name on the Hub, or the last part of a folder's path: the rest would disclose local names.

    A folder in the cache of huggingface_hub is known by its path.
    """
    if cached := _CACHED.search(model):
        return f"{cached[1]}/{cached[2]}"
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not model.startswith(".") and not Path(model).exists()
    return model if on_hub else PurePath(model).name
