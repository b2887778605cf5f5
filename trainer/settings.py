"""TOML files of the user's as checked models."""

import tomllib
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from rolltap.trainer.errors import UserError, describe

Model = TypeVar("Model", bound=BaseModel)


def load_toml(file: Path | Traversable, kind: type[Model]) -> Model:
    """The settings in a file. Raises `UserError`, which names the file and each key that is wrong."""
    try:
        return kind.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    except ValidationError as error:
        raise UserError(f"{file}: {describe(error)}") from error
    except ValueError as error:
        raise UserError(f"{file} is not TOML: {error}") from error
