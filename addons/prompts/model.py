"""The model of a recorder or an engine: a folder, or a name on the Hugging Face Hub."""

from pathlib import Path

from rolltap.addons.errors import InputError

_CACHED_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json")
"""Files of a model of which the Hub's cache has one when the model was loaded before."""
_HUB_SECONDS = 10.0


def require_findable(model: str, *, ask_hub: bool = False) -> None:
    """Raise `InputError` for a path that does not exist and, with `ask_hub`, for an unknown name.

    Without `ask_hub`, names of the Hub and URLs are left as they are. The Hub is asked once, and
    not for a model in its cache: transformers asks for each file several times, for minutes without
    a network.
    """
    if Path(model).expanduser().exists():
        return
    # ORGANISATION/NAME or NAME is a name of the Hub, unless it begins like a path or with a folder
    first, *others = model.split("/")
    in_folder = len(others) == 1 and Path(first).is_dir()
    if model.startswith(("/", "~", ".")) or ("://" not in model and (len(others) > 1 or in_folder)):
        advice = "give the folder of a model, or its name on the Hugging Face Hub"
        raise InputError(f"there is no folder {model}: {advice}")
    if not ask_hub:
        return
    # the base installation does not have it
    from huggingface_hub import model_info, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        if not any(isinstance(try_to_load_from_cache(model, name), str) for name in _CACHED_FILES):
            model_info(model, timeout=_HUB_SECONDS)
        return
    except HFValidationError:
        reason = "and it is no name of a model on the Hugging Face Hub"
    except RepositoryNotFoundError:
        reason = "and the Hugging Face Hub has no such model, or it is private (hf auth login)"
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        reason = f"and the Hugging Face Hub does not answer ({first_line})"
    raise InputError(f"there is no folder {model}, {reason}: give the folder of the served model")


def resolve_model(model: str) -> str:
    """Return `model` as an absolute path when it is a local folder, else unchanged."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.is_dir() else model
