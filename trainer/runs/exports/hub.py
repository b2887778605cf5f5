"""A dataset repository on the Hugging Face Hub, at `https://huggingface.co` or at HF_ENDPOINT."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from rolltap.addons.errors import HubError, InputError


class Repository:
    """A dataset repository to push to. The constructor creates it if it does not exist, private
    unless `public`.

    The token is that of `hf auth login` or HF_TOKEN. Raises `InputError` when there is none, when
    `name` is not ORG/NAME, and, unless `public`, when the repository exists and is public. Raises
    `HubError` when the Hub refuses or cannot be reached.
    """

    def __init__(self, name: str, *, public: bool) -> None:
        self._api = HfApi()
        if get_token() is None:
            raise InputError(
                "there is no token for the Hub: log in with `hf auth login`, or set HF_TOKEN"
            )
        with _hub_errors(name, self._api.endpoint):
            self.name = self._api.create_repo(
                name, repo_type="dataset", private=not public, exist_ok=True
            ).repo_id
            is_private = self._api.repo_info(self.name, repo_type="dataset").private
        if not public and not is_private:
            raise InputError(
                f"{self.name} exists and is public: choose another repository, or allow it"
                " (--public, public=True)"
            )

    def upload(self, folder: Path, message: str) -> str:
        """Replace the Parquet files and the card by those of `folder`, in one commit. Return the
        repository's URL.

        Raises `HubError` when the Hub refuses or cannot be reached.
        """
        with _hub_errors(self.name, self._api.endpoint):
            self._api.upload_folder(
                repo_id=self.name,
                folder_path=folder,
                repo_type="dataset",
                commit_message=message,
                delete_patterns="*.parquet",
            )
        return f"{self._api.endpoint}/datasets/{self.name}"


@contextmanager
def _hub_errors(name: str, endpoint: str) -> Iterator[None]:
    """Turn errors of the Hub's client into `InputError` and `HubError`."""
    try:
        yield
    except HFValidationError as error:
        raise InputError(f"the repository {name!r} is not written as ORG/NAME ({error})") from error
    except HfHubHTTPError as error:
        raise HubError(
            f"the Hub at {endpoint} refused {name}: {error.server_message or error}"
        ) from error
    except (httpx.HTTPError, OSError, RuntimeError, ValueError) as error:
        # upload_folder's message names the file; the reason is only in its __cause__
        why = f"{error} {error.__cause__ or ''}".strip()
        raise HubError(f"{name} could not be pushed to the Hub at {endpoint}: {why}") from error
