"""Routing: method, path and headers of a request -> the model API and its operation.

A request that is not served and looks like a model call is answered with what would make it one.
"""

import json
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from urllib.parse import unquote

from rolltap.addons.dialects.anthropic import AnthropicMessages
from rolltap.addons.dialects.call import DialectError
from rolltap.addons.dialects.dialect import Dialect, Operation
from rolltap.addons.dialects.google import GoogleGenerateContent
from rolltap.addons.dialects.openai_chat import OpenAIChat
from rolltap.addons.dialects.openai_responses import OpenAIResponses

CHAT = OpenAIChat()
GEMINI = GoogleGenerateContent()
MESSAGES = AnthropicMessages()
RESPONSES = OpenAIResponses()
DIALECTS: list[Dialect] = [CHAT, GEMINI, MESSAGES, RESPONSES]

_MOST_FOLDERS = 12
"""Number of folders that a prefix may have: a search for one takes no longer for a longer path."""


@dataclass(frozen=True, slots=True)
class Route:
    """An API, the service that a request asks of it, and the prefix before the API's own path."""

    dialect: Dialect
    service: Operation
    prefix: str = ""

    def __str__(self) -> str:
        return f"{self.dialect.NAME} {self.service}"


def find_route(
    method: str,
    target: str,
    headers: Mapping[str, str],
) -> Route | None:
    """Return the route of a request to `target` (path and query), or None when it is not served.

    An API is served at its own paths, and behind any prefix, because providers and gateways have
    such paths: `/openai/deployments/NAME`, `/api/anthropic`, `/api/paas/v4`. The shortest one
    counts. Of models there, only the list is served.

    `headers` are looked up in lower case. OpenAI and Anthropic list models under the same path: the
    header `anthropic-version`, which Anthropic's API requires, selects Anthropic.
    """
    dialects = DIALECTS
    if "anthropic-version" in headers:
        dialects = [MESSAGES, *DIALECTS]
    path = target.partition("?")[0]
    if not path.startswith("/"):
        return None
    start = 0
    for _ in range(_MOST_FOLDERS + 1):
        for dialect in dialects:
            operation = dialect.operation(method, path[start:])
            if operation == "models" and start and not path.endswith("/models"):
                continue  # a page of another kind has such a path too, for instance a file's
            if operation is not None:
                return Route(dialect, operation, path[:start])
        start = path.find("/", start + 1)
        if start < 0:
            break
    return None


_SAMPLES = re.compile(
    r"[^/]*/(.*:)?(complete|completions|responses|messages|converse|invoke)"
    r"|[^/]*/(.*:)?((stream)?(raw)?predict|(stream|batch)?generate)"
    r"|(api|v\d+)/chat(?![\w-])"
    r"|[^/]*/(batches|language-model)(?![\w-])",
)
"""Beginnings of the last folder and the name of a path in model APIs, also in APIs that are not
served here, and in batches of calls."""
_DECODED = 3
"""Number of times that a path is decoded: by proxies, and by the server behind them."""

_PATHS = ("chat/completions", "responses", "messages")
"""Paths that ask for a reply, after `/v1/`."""
_ALIKE = 0.85
"""Similarity of a mistyped path, of `difflib`: one letter that is wrong, missing or too much."""
_LONGEST = 100
"""Characters of a path that may be a mistyped one."""
_BEDROCK = "Bedrock's Converse and InvokeModel"
_NOT_SERVED = {
    _BEDROCK: r"/model/[^/]+/(converse|invoke)[a-z-]*",
    "Google's Interactions API": r"/v\d\w*/interactions",
    "Google's Live API": r"/ws/google\..*bidigenerate(content|music)",
    "OpenAI's Assistants API": r".*/v1/threads/(runs|[^/]+/runs(/[^/]+/submit_tool_outputs)?)",
    "OpenAI's Realtime API": r".*/v1/(realtime|live/sessions)(/\w+)?",
}
"""Name of a model API that is not served -> the paths of its model calls."""


def api_not_served(target: str) -> str:
    """Return the name of the API whose model call a request to `target` is, or "" if it is none."""
    path = target.partition("?")[0].lower()
    for name, pattern in _NOT_SERVED.items():
        if re.fullmatch(pattern, path):
            return name
    return ""


def looks_like_model_call(method: str, target: str) -> bool:
    """Return True when a request that is not served is probably a model call.

    A heuristic: a POST whose path ends like those of known model APIs. Servers differ in the parts
    of a path that they ignore. It is compared as the most tolerant one would read it: decoded, in
    lower case, without parameters, empty folders and dot segments, and only to the end of the name.
    """
    if method != "POST":
        return False
    if api_not_served(target):
        return True
    path = target.partition("?")[0]
    for _ in range(_DECODED):
        path = unquote(path)
    path = re.sub(r";[^/]*|[?#].*", "", path.replace("\\", "/"), flags=re.S)
    folders = posixpath.normpath(f"///{path}").lower().split("/")
    return _SAMPLES.match("/".join(folders[-2:])) is not None


def advice(method: str, target: str) -> str:
    """Return the remedy for a model call that is not served, or "" when it is probably none.

    Either its API is not served, or its path is mistyped.
    """
    if method != "POST":
        return ""
    path = target.partition("?")[0]
    if name := api_not_served(target):
        use = "Let the program use OpenAI's Chat Completions or Responses, or Anthropic's Messages"
        return f"the recorder does not serve {name}. {use}"
    if len(path) > _LONGEST:
        return ""
    folders = [folder for folder in path.lower().split("/") if folder]
    for length in (2, 1):
        for meant in get_close_matches("/".join(folders[-length:]), _PATHS, 1, _ALIKE):
            return f"did you mean /v1/{meant}?"
    return ""


def not_served(
    method: str,
    target: str,
    headers: Mapping[str, str],
) -> bytes:
    """Return the body of a 404 in the format of the API that the request resembles.

    Returns an empty JSON object for a request that resembles none.
    """
    path = target.partition("?")[0]
    remedy = advice(method, target)
    why = f"{method} {path} is not served here."
    if remedy:
        why = f"{why[:-1]}: {remedy}"
    dialect: Dialect
    if api_not_served(target) == _BEDROCK:
        return json.dumps({"__type": "ResourceNotFoundException", "message": why}).encode()
    if "anthropic-version" in headers:
        dialect = MESSAGES
    elif path.startswith("/v1beta"):
        dialect = GEMINI
    elif path.startswith("/v1/") or remedy:
        dialect = CHAT
    else:
        return b"{}"
    return dialect.encode_error(DialectError(why, status=404, code="not_found"))
