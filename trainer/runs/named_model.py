"""The model of an import: the entries of `run.json` that a recorder writes for it."""

from pathlib import Path
from typing import Any

from rolltap.addons.errors import InputError, MissingPackageError
from rolltap.addons.store.metadata import tokenizer_digests

_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "config.json")
"""Files of which a folder with a tokenizer has one: without any, transformers says much and nothing of the folder."""


def named_model(model: str) -> dict[str, Any]:
    """Return the model's name, and the digests of its tokenizer and chat template. `model` is a folder or a name.

    Raises `MissingPackageError` without transformers, and `InputError` when there is no tokenizer.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingPackageError(
            f"the tokenizer needs transformers ({error}): pip install 'rolltap[record]'"
        ) from error
    folder = Path(model).expanduser()
    name = str(folder.resolve()) if folder.is_dir() else model
    if folder.is_dir() and not any((folder / file).exists() for file in _FILES):
        raise InputError(f"the folder {model} has none of {', '.join(_FILES)}: give the folder or name of a model")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise InputError(f"model {model}: no tokenizer can be loaded: {error}; give its folder or name") from error
    return {"model": name, **tokenizer_digests(tokenizer.get_vocab(), tokenizer.chat_template)}
