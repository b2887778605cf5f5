"""The environment variables of a session: through the recorder, trusting its certificate, from a home of its own."""

import os
from pathlib import Path
from urllib.parse import quote

import certifi

from rolltap.addons.credentials import token

_INHERITED = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TERM", "TMPDIR", "USER", "LOGNAME", "SHELL")
_PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy")
_BUNDLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "CODEX_CA_CERTIFICATE")


def proxy_url(address: str, session_id: str, secret: str) -> str:
    """The recorder at `address` (host:port) with the credentials of a session."""
    return f"http://{quote(session_id, safe='')}:{token(secret, session_id)}@{address}"


def proxy_environment(proxy_url: str, ca: Path, bundle: Path) -> dict[str, str]:
    """The variables that make a program send its calls through the recorder and trust its certificate.

    `ca` is the recorder's CA alone, for programs that add it to their roots; `bundle` has the usual roots as well,
    for programs that replace theirs by it. Every known variable is set, as each program reads another one.
    """
    return {
        **dict.fromkeys(_PROXIES, proxy_url),
        "NO_PROXY": "",
        "no_proxy": "",
        "NODE_EXTRA_CA_CERTS": str(ca),
        **dict.fromkeys(_BUNDLES, str(bundle)),
    }


def write_bundle(ca: Path, bundle: Path) -> None:
    """Write the usual root certificates and the recorder's CA into the file `bundle`."""
    bundle.write_text(Path(certifi.where()).read_text() + "\n" + ca.read_text())


def clean_environment(home: Path) -> dict[str, str]:
    """The environment a session starts from: nothing of the caller's keys and configuration, its own home."""
    return {**{name: os.environ[name] for name in _INHERITED if name in os.environ}, "HOME": str(home)}
