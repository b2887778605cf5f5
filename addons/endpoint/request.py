"""A request of a session: what the proxy says about it, and the call that is prepared from it."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import unquote

from aiohttp import web

from rolltap.addons.dialects.call import ModelCall
from rolltap.addons.prompts.conversations import Prompt
from rolltap.addons.store.records import Call, Event, EventKind
from rolltap.addons.store.rows import printable

SECRET_HEADER = "x-rolltap-secret"
SESSION_HEADER = "x-rolltap-session"
HOST_HEADER = "x-rolltap-host"
END_PATH = "/end"
"""A `POST` to this path ends the session: running calls are recorded as aborted, commits are synced
unless `rolltap_fsync` is `never`, and later calls are refused. A body gives it a reward: see
`rolltap_accept_rewards`."""


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A request of a session, without its body. `host` and `path` are printable and cut, for the
    record."""

    session_id: str
    host: str
    """The host that the harness addressed."""
    method: str
    path: str
    target: str
    """Path and query, without what a gateway has before the API's own path."""
    headers: Mapping[str, str]
    """Looked up without case."""

    @classmethod
    def of(cls, request: web.Request, prefix: str = "") -> Self:
        """Return an HTTP request without its body. `prefix` is what its path has before the
        API's own path."""
        headers = request.headers
        target = request.raw_path.removeprefix(prefix)
        path = unquote(target.partition("?")[0])
        return cls(
            session_id=headers[SESSION_HEADER],
            host=headers[HOST_HEADER],
            method=request.method,
            path=printable(recordable_prefix(prefix) + path),
            target=target,
            headers=headers,
        )

    def event(self, kind: EventKind, detail: str = "", call_id: str | None = None) -> Event:
        """Return an event about the request."""
        return Event(
            kind=kind,
            session_id=self.session_id,
            host=self.host,
            method=self.method,
            path=self.path,
            detail=detail,
            call_id=call_id,
        )


@dataclass(slots=True)
class PreparedCall:
    """A decoded request with its prompt: all that a generation begins with."""

    call: Call
    """The row as it begins: prompt, parent and request, nothing sampled."""
    prompt: Prompt
    sampling: dict[str, Any]
    """vLLM's sampling parameters."""
    digest: bytes
    """The `request_digest`."""
    asked: dict[str, Any] = field(default_factory=dict)
    """Key `asked` of the row's `sampling`: the `options_asked`, and parameters of `sampling` as
    they were before a budget or an engine changed them."""
    controls: str | None = None
    """The `ControlTokens.found` of what the prompt has after its parent's."""
    difference: str | None = None
    """The difference to the recorded calls of a rerun, which ends the session."""


_FOLDER = re.compile(r"[\w.-]{0,16}", re.ASCII)
"""Folders of gateways' paths. Keys, which some gateways take in a path, are longer."""


def recordable_prefix(prefix: str) -> str:
    """Return what a path has before the API's own path, as it is recorded."""
    folders: list[str] = []
    for folder in prefix.split("/"):
        if not _FOLDER.fullmatch(folder):
            folder = f"({len(folder)} characters)"
        folders.append(folder)
    return "/".join(folders)


def sampling_parameters(
    own: Mapping[str, Any],
    stop_token_ids: Sequence[int],
    model_call: ModelCall,
    max_new_tokens: int,
) -> dict[str, Any]:
    """Return vLLM's parameters: the recorder's `own`, and the harness's token limit, stop texts
    and grammar."""
    most = min(max_new_tokens, own.get("max_tokens", max_new_tokens))
    if model_call.max_tokens:
        most = min(most, model_call.max_tokens)
    sampling = {**own, "max_tokens": most, "stop_token_ids": stop_token_ids}
    if model_call.stop:
        sampling["stop"] = model_call.stop
    if model_call.grammar is not None:
        sampling["structured_outputs"] = model_call.grammar
    return sampling


def request_digest(
    dialect: str,
    model: str,
    prompt_digest: bytes,
    sampling: Mapping[str, Any],
) -> bytes:
    """Return the digest of a request. Requests with the same digest repeat each other.

    It covers the API, the model's name, the prompt (by its `ids_digest`) and `sampling`, the
    parsed column `sampling` of the call's row: the parameters sent to the engine (token limit,
    stop texts, schema) and `asked`. A parameter that a budget or an engine has changed counts as
    it was: the value in `asked`.
    """
    asked = dict(sampling.get("asked", {}))
    before = dict(sampling)
    for name in ("max_tokens", "structured_outputs"):
        if name in asked:
            before[name] = asked.pop(name)
    request = [dialect, model, {**before, "asked": asked}]
    text = json.dumps(request, sort_keys=True)
    return hashlib.blake2b(prompt_digest + text.encode(), digest_size=16).digest()
