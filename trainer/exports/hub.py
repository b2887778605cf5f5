"""A dataset repository on the Hugging Face Hub: `https://huggingface.co`, or where HF_ENDPOINT points."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from rolltap.addons.errors import HubError, InputError


class Repository:
    """A dataset repository that may be written to: a new one, or one that exists already.

    The token is that of `hf auth login` or HF_TOKEN. Raises `InputError` when there is none, when the Hub refuses or
    cannot be reached, and, unless `public`, when the repository exists and is public.
    """

    def __init__(self, name: str, *, public: bool) -> None:
        self._api = HfApi()
        if get_token() is None:
            raise InputError("there is no token for the Hub: log in with `hf auth login`, or set HF_TOKEN")
        with _told(name, self._api.endpoint):
            self.name = self._api.create_repo(name, repo_type="dataset", private=not public, exist_ok=True).repo_id
            is_private = self._api.repo_info(self.name, repo_type="dataset").private
        if not public and not is_private:
            raise InputError(f"{self.name} exists and is public: choose another --repo, or say --public")

    def upload(self, folder: Path, message: str) -> str:
        """Replace the Parquet files and the card by those of `folder`, in one commit; returns the repository's URL.

        Raises `InputError` when the Hub refuses or cannot be reached.
        """
        with _told(self.name, self._api.endpoint):
            self._api.upload_folder(
                repo_id=self.name,
                folder_path=folder,
                repo_type="dataset",
                commit_message=message,
                delete_patterns="*.parquet",
            )
        return f"{self._api.endpoint}/datasets/{self.name}"


@contextmanager
def _told(name: str, endpoint: str) -> Iterator[None]:
    """Turn what goes wrong on the way to the Hub into errors of the user."""
    try:
        yield
    except HFValidationError as error:
        raise InputError(f"--repo {name}: write it as ORG/NAME ({error})") from error
    except HfHubHTTPError as error:
        raise HubError(f"the Hub at {endpoint} refused {name}: {error.server_message or error}") from error
    except (httpx.HTTPError, OSError, RuntimeError, ValueError) as error:
        # upload_folder says which file failed, and why only as the cause
        why = f"{error} {error.__cause__ or ''}".strip()
        raise HubError(f"{name} could not be pushed to the Hub at {endpoint}: {why}") from error
