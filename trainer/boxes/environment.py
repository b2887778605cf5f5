"""The environment variables of a session: through the recorder, trusting its certificate, from a
home of its own."""

import os
import ssl
import time
from pathlib import Path
from urllib.parse import quote, urlsplit

import certifi
import httpx

from rolltap.addons.errors import InputError, RecorderError
from rolltap.addons.secret import password
from rolltap.trainer.boxes.runtime import Mount
from rolltap.trainer.concurrency import backoff

SESSION_END = "http://session.rolltap/end"
"""URL that ends a session, requested through the proxy with the session's credentials
(`rolltap.addons.proxy.capture`)."""

PLAIN_HTTP = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""A context without certificates, for requests to the recorder by plain HTTP. httpx makes a context
for each request; to read the root certificates takes 16 ms."""

CERTIFICATES = "/etc/rolltap"
"""Folder of the recorder's certificates in a box that has files of its own."""

_INHERITED = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TERM")
_OF_THIS_MACHINE = ("TMPDIR", "USER", "LOGNAME", "SHELL")
"""Variables that mean nothing in a box with files of its own."""
_PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
_LOOPBACK = "localhost,127.0.0.1,::1"
"""Hosts that programs reach directly: servers that they start themselves. httpx raises at `[::1]`.
"""
_DIRECT = ("NO_PROXY", "no_proxy")
_BUNDLES = (
    "SSL_CERT_FILE REQUESTS_CA_BUNDLE CURL_CA_BUNDLE AWS_CA_BUNDLE GIT_SSL_CAINFO"
    " CODEX_CA_CERTIFICATE"
)
_END_SECONDS = 300.0
"""Timeout of ending a session: the disk may be slow, and a large file may be compacted."""


class Proxy:
    """A recorder that runs already, as its sessions reach it.

    `url` is `http://HOST:PORT`. `ca` is the recorder's CA certificate, `secret` what its
    `rolltap_secret_file` holds. The usual root certificates and the CA are written to the file
    `bundle`, by default `rolltap-ca-bundle.pem` beside the CA. A container needs both files under
    the same paths.

    Raises `InputError` for a malformed URL, a CA that does not exist, and a bundle that cannot be
    written.
    """

    def __init__(
        self,
        url: str,
        *,
        ca: str | Path = "~/.mitmproxy/mitmproxy-ca-cert.pem",
        secret: str = "",
        bundle: str | Path | None = None,
    ) -> None:
        address = urlsplit(url).netloc
        if not address or "@" in address or url.rstrip("/") != f"http://{address}":
            raise InputError(f"the proxy {url!r} is not written as http://HOST:PORT")
        self.address = address
        """The recorder as this machine reaches it, `HOST:PORT`."""
        self._secret = secret
        self.ca = Path(ca).expanduser().absolute()
        self.bundle = self.ca.with_name("rolltap-ca-bundle.pem")
        if bundle is not None:
            self.bundle = Path(bundle).absolute()
        try:
            recorder_ca = self.ca.read_text()
        except OSError as error:
            raise InputError(
                f"there is no CA certificate {self.ca} ({error.strerror}): the recorder makes it"
                " when it first starts"
            ) from error
        try:
            self.bundle.write_text(Path(certifi.where()).read_text() + "\n" + recorder_ca)
        except OSError as error:
            raise InputError(
                f"cannot write {self.bundle}: {error.strerror}; name another file"
            ) from error

    def mounts(self) -> list[Mount]:
        """Return the certificates as a box shows them, in the folder `CERTIFICATES`."""
        return [
            Mount(self.ca, f"{CERTIFICATES}/ca.pem"),
            Mount(self.bundle, f"{CERTIFICATES}/ca-bundle.pem"),
        ]

    def url(self, session_id: str, address: str | None = None) -> str:
        """Return the proxy's URL with the credentials of a session.

        `address` is where the session reaches it, `HOST:PORT`, or `https://HOST:PORT` behind TLS.
        """
        user = f"{quote(session_id, safe='')}:{password(self._secret, session_id)}"
        scheme, _, place = (address or self.address).rpartition("://")
        return f"{scheme or 'http'}://{user}@{place}"

    def environment(
        self, session_id: str, *, address: str | None = None, certificates: str | None = None
    ) -> dict[str, str]:
        """Return the variables that make a program send its calls through the recorder and trust
        its certificate.

        Programs that add certificates to their roots get the CA; programs that replace their roots
        get the bundle. Each program reads other variables, so all known ones are set. Node's own
        `fetch` reads the proxy's with `NODE_USE_ENV_PROXY`, in Node 22.21, 24.5 and newer. Loopback
        is reached directly: servers that the program starts, and MCP servers.

        In a box with files and a network of its own, `address` is the recorder as its programs
        reach it, and `certificates` the folder of `mounts`.
        """
        ca = str(self.ca)
        bundle = str(self.bundle)
        if certificates is not None:
            ca = f"{certificates}/ca.pem"
            bundle = f"{certificates}/ca-bundle.pem"
        return {
            **dict.fromkeys(_PROXIES, self.url(session_id, address)),
            **dict.fromkeys(_DIRECT, _LOOPBACK),
            "NODE_USE_ENV_PROXY": "1",
            "NODE_EXTRA_CA_CERTS": ca,
            **dict.fromkeys(_BUNDLES.split(), bundle),
        }

    def end_session(self, session_id: str) -> None:
        """End a session: the recorder records its running calls, syncs it to the disk and refuses
        further requests.

        Raises `RecorderError` when the recorder does not answer or cannot do that.
        """
        for pause in backoff(3, 0.2):
            try:
                answer = httpx.post(
                    SESSION_END,
                    proxy=self.url(session_id),
                    verify=PLAIN_HTTP,
                    trust_env=False,
                    timeout=_END_SECONDS,
                )
                break
            except httpx.HTTPError as error:
                # a connection may be closed to make room for others; to end a session twice changes
                # nothing
                if pause is None or isinstance(error, httpx.TimeoutException):
                    raise RecorderError(
                        f"the recorder does not end session {session_id}: {error!r}"
                    ) from error
                time.sleep(pause)
        if answer.status_code != 200:
            raise RecorderError(f"the recorder cannot end session {session_id}: {answer.text}")


def clean_environment(home: Path, *, isolated: bool = False) -> dict[str, str]:
    """Return the environment that a session starts from: its own home, and none of the caller's
    keys and settings.

    `isolated` is True in a box with files of its own.
    """
    names = [*_INHERITED]
    if not isolated:
        names += _OF_THIS_MACHINE
    environment = {name: os.environ[name] for name in names if name in os.environ}
    environment["HOME"] = str(home)
    return environment
