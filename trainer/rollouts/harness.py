"""A harness: the command line and environment of an unmodified agent program, as data."""

import os
import shutil
import tomllib
from pathlib import Path

import certifi
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rolltap.trainer.errors import UserError, describe

_INHERITED = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TERM", "TMPDIR", "USER", "LOGNAME", "SHELL")


class Harness(BaseModel):
    """A preset file (TOML)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1)
    """Names the harness in the dataset."""
    version: str
    """The version that this preset was tested with."""
    command: list[str] = Field(min_length=1)
    """Program and arguments; `{instruction}` stands for the task's instruction."""
    env: dict[str, str] = {}
    """Variables the program needs to run headless: a placeholder key where it refuses to start without one, telemetry
    and update checks off."""

    def command_for(self, instruction: str) -> list[str]:
        """The command line of one session."""
        return [argument.replace("{instruction}", instruction) for argument in self.command]


def load_harness(path: Path) -> Harness:
    """The preset in a TOML file. Raises `UserError`."""
    try:
        return Harness.model_validate(tomllib.loads(path.read_text()))
    except OSError as error:
        raise UserError(f"cannot read the harness preset {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not TOML: {error}") from error
    except ValidationError as error:
        raise UserError(f"{path}: {describe(error)}") from error


def require_program(program: str) -> None:
    """Raise `UserError` unless `program` can be started."""
    if shutil.which(program) is None:
        raise UserError(f"{program!r} is not on the PATH: install it, or give its folder with PATH=...:$PATH")


def proxy_environment(proxy_url: str, ca: Path, bundle: Path) -> dict[str, str]:
    """What makes a program send its calls through the recorder and trust its certificate.

    `ca` is the recorder's CA alone, for programs that add it to their roots; `bundle` has the usual roots as well,
    for programs that replace theirs by it. Every known variable is set, as each program reads another one.
    """
    return {
        **dict.fromkeys(("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"), proxy_url),
        "NO_PROXY": "",
        "no_proxy": "",
        "NODE_EXTRA_CA_CERTS": str(ca),
        **{
            name: str(bundle)
            for name in (
                "SSL_CERT_FILE",
                "REQUESTS_CA_BUNDLE",
                "CURL_CA_BUNDLE",
                "GIT_SSL_CAINFO",
                "CODEX_CA_CERTIFICATE",
            )
        },
    }


def write_bundle(ca: Path, folder: Path) -> Path:
    """A file with the usual root certificates and the recorder's CA."""
    bundle = folder / "ca-bundle.pem"
    bundle.write_text(Path(certifi.where()).read_text() + "\n" + ca.read_text())
    return bundle


def clean_environment(home: Path) -> dict[str, str]:
    """The environment a session starts from: nothing of the caller's keys and configuration, its own home."""
    return {**{name: os.environ[name] for name in _INHERITED if name in os.environ}, "HOME": str(home)}
