"""Options of the recorder: name, type, default, bounds and text of each, in one place.

mitmdump declares and reads them, the trainer checks them before it starts mitmdump, and the table
of recipes/site/pages/recording.md is made from them. The file does not import mitmproxy, because
the trainer checks options without it.
"""

import difflib
import ipaddress
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    with_config,
)
from pydantic.fields import FieldInfo
from typing_extensions import TypedDict

from rolltap.addons.errors import InputError

if TYPE_CHECKING:
    from mitmproxy.addonmanager import Loader
    from mitmproxy.optmanager import OptManager

PREFIX = "rolltap_"
"""Begins the names of the recorder's own options. All others are mitmproxy's."""
Sync = Literal["never", "session", "call"]
"""Time when commits are synced (`fdatasync`): `call`, before a reply ends; `session`, when a
session ends; `never`.

A killed process loses no commit in any case. A machine crash may lose with `call` the events and
the failed or aborted calls of sessions that have not ended, with `session` all commits of such
sessions, with `never` every commit that the system has not written back.
"""
Images = Literal["hide", "refuse"]
"""Treatment of images, audio and files: a text in their place, or an error."""
NEUTRAL_SAMPLING: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Samples from the unmodified policy, so that sampled tokens follow the recorded log-probabilities.
Each call sends all of them, because vLLM takes missing ones from the model's
generation_config.json."""
_ALIKE = 0.6
"""Least similarity of two names, as difflib counts it, to suggest one for the other."""


def _whole(number: Any) -> Any:
    """Return 5 for 5.0: JSON has one type of numbers."""
    if isinstance(number, float) and number.is_integer():
        return int(number)
    return number


_Whole = Annotated[int, BeforeValidator(_whole)]


@with_config(ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))
class Sampling(TypedDict, total=False):
    """Sampling parameters of all calls, with the least and the greatest value that vLLM takes."""

    temperature: Annotated[float, Field(ge=0, le=2)]
    top_p: Annotated[float, Field(gt=0, le=1)]
    top_k: Annotated[_Whole, Field(ge=-1, lt=2**31)]
    min_p: Annotated[float, Field(ge=0, le=1)]
    presence_penalty: Annotated[float, Field(ge=-2, le=2)]
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)]
    repetition_penalty: Annotated[float, Field(gt=0, le=sys.float_info.max)]
    max_tokens: Annotated[_Whole, Field(ge=1, lt=2**31)]
    seed: Annotated[_Whole, Field(ge=-(2**63), lt=2**63)]


class RecordedFrom(NamedTuple):
    """The recorded session whose calls answer the requests; those that began at `until` or later
    are sampled. `copy` is a run folder with its calls, where `run` itself is not at hand."""

    run: Path
    session: str
    until: datetime | None = None
    copy: Path | None = None

    @property
    def folder(self) -> Path:
        """The run folder that is read."""
        return self.copy or self.run


def engine_urls(text: str) -> tuple[str, ...]:
    """Return the URLs of engines in a text with commas between them.

    Raises `ValueError` with the end of a sentence that begins with the name of an option.
    """
    urls = tuple(url.strip() for url in text.split(","))
    for url in urls:
        parts = urlsplit(url)
        if parts.username or parts.password:
            # the URL is recorded with each call, and a run must not contain secrets
            raise ValueError("contains a user name or password: remove them from the URL")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"is {url!r}: give a URL such as http://127.0.0.1:8000")
        if parts.path.rstrip("/").endswith("/v1"):
            raise ValueError(f"is {url!r}: leave out /v1")
    return urls


def _urls(value: Any) -> Any:
    return engine_urls(value) if isinstance(value, str) else value


def _from_json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from error


def _with_neutral(sampling: Sampling) -> Mapping[str, Any]:
    return {**NEUTRAL_SAMPLING, **sampling}


_Flag = Annotated[bool, Field(strict=True)]
_Number = Annotated[int, Field(strict=True, ge=0)]


class RecorderOptions(BaseModel):
    """Options of the recorder. A field `NAME` is mitmproxy's option `rolltap_NAME`.

    mitmproxy knows texts, whole numbers, flags and lists of texts. Its values, and the texts of
    `--set` in a list, are taken besides values of the fields' own types. An empty text is not set.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        use_attribute_docstrings=True,
    )

    out: Annotated[Path, AfterValidator(Path.expanduser)]
    """Run folder to record to. Created if it does not exist."""
    engine: Annotated[tuple[str, ...], BeforeValidator(_urls)]
    """Base URL of the vLLM server, for instance `http://127.0.0.1:8000`. Separate several servers
    of the same model with commas."""
    model: str
    """Model whose tokenizer is used: a folder or a Hugging Face name. Must be the model that the
    engine serves."""
    renderer: str = "auto"
    """Renderer from conversations to token ids: a name of the `renderers` library, for instance
    `qwen3`, or `auto` to find the one that agrees with the model's chat template."""
    tool_parser: str = "auto"
    """Reader of tool calls and reasoning in replies: a family in `addons/prompts/families.toml`,
    for instance `hermes`, or `auto` to find the one that reads what the model's prompts write."""
    sampling: Annotated[
        Sampling,
        BeforeValidator(_from_json),
        AfterValidator(_with_neutral),
    ] = Field(default_factory=Sampling)
    """Sampling parameters of all calls, a JSON object such as `{"temperature": 0.7}`. Keys:
    `temperature`, `top_p`, `top_k`, `min_p`, `presence_penalty`, `frequency_penalty`,
    `repetition_penalty`, `max_tokens`, `seed`. Missing keys are neutral: temperature 1, top_p 1, no
    top_k, no penalties. Only the token limit, stop texts and JSON schema of a harness's request are
    applied; its sampling parameters are recorded."""
    allow: tuple[str, ...] = ()
    """Host that sessions may reach: a name or a pattern with `*` and `?`, for instance `pypi.org`
    or `*.pythonhosted.org`. It stands for the ports 80 and 443, `pypi.org:8443` for another,
    `pypi.org:*` for all. No connection is made to a private or loopback address, unless a pattern
    is that very address or `localhost`. Repeat the option for more hosts. Model calls to any host
    are answered by the recorder and never reach their host; a host that is named without a wildcard
    keeps the paths of its own which end as those of a model API (the run gets an event `uncaptured`
    for a possible model call). Other requests to other hosts get 404, and the run gets an event."""
    images: Images = "hide"
    """Treatment of images, audio and files in a conversation. `hide`: a text such as `[image/png,
    not shown: this model reads text]` stands in their place, and the run gets an event (`hidden`).
    `refuse`: the request gets an error of its API."""
    secret_file: str = ""
    """File, or `/dev/fd/NUMBER`, with the key of the sessions' proxy passwords. A password is the
    hexadecimal HMAC-SHA256 of the session id. The file is read once; other users must not be able
    to read it. Required unless the proxy listens on loopback. If not set, any password is
    accepted."""
    engine_key_file: str = ""
    """File with the key of the engines, one for all, or `/dev/fd/NUMBER`. By default the file that
    the environment variable `ROLLTAP_ENGINE_KEY_FILE` names, if any. `rolltap serve` makes it."""
    patience: _Number = 120
    """Seconds after an engine failure, at first contact too, during which a call is retried. A
    newly sampled token resets it. A retry continues after the last sampled token. When it is used
    up, the harness gets an error."""
    keep_adapter: _Flag = True
    """A session keeps the LoRA adapter with which its first call was sampled, though newer ones are
    published, so that its prefix cache in the engine stays. When false, each request gets the
    newest adapter. A restarted recorder finds an adapter again only under the name
    `policy-VERSION`, as rolltap publishes it."""
    fsync: Sync = "session"
    """Time when recorded calls are synced to disk: `call`, before a reply ends; `session`, when a
    session ends; `never`, left to the operating system. A killed recorder loses no committed call
    in any case. A machine crash can lose calls that are not synced."""
    routing: _Flag = False
    """Record the experts that the engine chose for each token, so that a training can choose the
    same (`grpo.routing = "recorded"`). The engine needs `rolltap serve --routing`. A token takes
    one byte for each chosen expert in each layer, two bytes with more than 256 experts."""
    max_calls: _Number = 0
    """Budget of model calls of a session. Failed ones do not count. 0 is no budget."""
    max_sampled_tokens: _Number = 0
    """Budget of tokens that are sampled for a session. The last reply is cut. 0 is no budget."""
    max_prompt_tokens: _Number = 0
    """Budget of prompt tokens of one call. A longer one gets its API's error for a full context
    window. 0 is no budget."""
    accept_rewards: _Flag = False
    """Accept a reward with the request that ends a session: a POST through the proxy to
    `http://session.rolltap/end` with a JSON object of the keys reward, parts, task and group. Only
    for programs that you trust: a harness knows its session's credentials, and can send a reward of
    its own."""
    rerun: Annotated[RecordedFrom | None, BeforeValidator(_from_json)] = None
    """Recorded session whose calls answer the requests, as `rolltap rerun` sets it: a JSON object
    such as `{"run": "runs/a", "session": "s1"}`. `rolltap_engine` is then the session's and gets no
    request. With the key `until`, a time, calls that began then or later are sampled, as `rolltap
    fork` sets it."""
    ready: str = ""
    """File, or `/dev/fd/NUMBER`, to write the proxy's address to once it listens: one line of JSON
    with the keys `host`, `port` and `warnings`, a list of texts about the model and the engines."""
    boxes: str = ""
    """`/dev/fd/NUMBER` of a Unix socket (SOCK_SEQPACKET) through which rolltap hands over sockets
    that listen in its boxes. The proxy accepts connections there too."""

    @classmethod
    def load(cls, loader: "Loader") -> None:
        """Declare the options to mitmproxy."""
        for name, field in cls.model_fields.items():
            default = _default(field)
            kind: Any = type(default)
            if kind is tuple:
                kind = Sequence[str]
            choices = None
            if get_origin(field.annotation) is Literal:
                choices = get_args(field.annotation)
            loader.add_option(PREFIX + name, kind, default, field.description or "", choices)

    @classmethod
    def read(cls, options: "OptManager") -> Self:
        """Return the options that mitmdump has. Raises as `parse`."""
        return cls.parse({name: getattr(options, name) for name in OPTIONS})

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Self:
        """Return options by their names in mitmproxy. Those of mitmproxy itself are ignored.

        Raises `InputError` with a line for each unknown name, and for each missing or impossible
        value.
        """
        values = {}
        for name, value in given.items():
            if name.startswith(PREFIX):
                values[name.removeprefix(PREFIX)] = value
        for name, field in cls.model_fields.items():
            if values.get(name) in ("", [""]) and isinstance(_default(field), str):
                del values[name]
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise InputError("\n".join(_refusals(error))) from error

    @field_validator("*", mode="before")
    @classmethod
    def _from_texts(cls, value: Any, info: ValidationInfo) -> Any:
        """Read the list of texts that `--set` collects, where the option is no list."""
        assert info.field_name is not None
        default = _default(cls.model_fields[info.field_name])
        if isinstance(default, tuple) or not isinstance(value, list):
            return value
        match value:
            case [] | ["" | "true"] if isinstance(default, bool):
                return True
            case ["false"] if isinstance(default, bool):
                return False
            case [text] if type(default) is int and text.removeprefix("-").isdecimal():
                return int(text)
            case [text]:
                return text
        raise ValueError(f"is {value}: give one text")


OPTIONS = tuple(PREFIX + name for name in RecorderOptions.model_fields)
"""Names of the options in mitmproxy."""
_REQUIRED = {
    "rolltap_out": "run",
    "rolltap_engine": "http://127.0.0.1:8000",
    "rolltap_model": "model",
}
"""Examples of the required options."""


def check_options(given: Mapping[str, Any]) -> RecorderOptions:
    """Return options of which the required ones may be missing: examples stand in their place.

    Raises as `RecorderOptions.parse`.
    """
    return RecorderOptions.parse({**_REQUIRED, **given})


def require_options(given: Mapping[str, str | Sequence[str]], where: str = "") -> RecorderOptions:
    """Return the options of a recorder that is not started yet, by their texts, as `check_options`.

    A repeated option has a list of texts. `where` is written before a name in an error.
    """
    texts = {}
    for name, value in given.items():
        texts[name] = [value] if isinstance(value, str) else [*value]
    try:
        return check_options(texts)
    except InputError as error:
        lines = [where + line for line in str(error).splitlines()]
        raise InputError("\n".join(lines)) from error


def _default(field: FieldInfo) -> bool | int | str | tuple[str, ...]:
    """Return the default of an option in mitmproxy, where an empty text is not set."""
    if isinstance(field.default, bool | int | str | tuple):
        return field.default
    return ""


def _refusals(error: ValidationError) -> Iterator[str]:
    for each in error.errors():
        name = PREFIX + ".".join(map(str, each["loc"]))
        is_key = "." in name
        match each["type"]:
            case "missing" if not is_key:
                yield f"{name} is not set: add --set {name}=..."
            case "extra_forbidden" if name.startswith("rolltap_sampling."):
                yield f"{name} is unknown: use {', '.join(Sampling.__annotations__)}"
            case "extra_forbidden" if not is_key:
                yield unknown(name, OPTIONS)
            case "value_error":
                yield f"{name} {each['ctx']['error']}"
            case _:
                yield f"{name} is {each['input']!r}: {each['msg']}"


def unknown(name: str, known: Collection[str]) -> str:
    """Return the refusal of a name, with the one of the `known` ones that resembles it, if there is
    one."""
    # without the prefix: it makes all of them alike
    own = {each.removeprefix(PREFIX): each for each in sorted(known)}
    near = difflib.get_close_matches(name.removeprefix(PREFIX), own, 1, _ALIKE)
    hint = "`mitmdump -s $(rolltap addon) --options` lists them"
    if near:
        hint = f"did you mean {own[near[0]]}?"
    return f"{name} is no option of the recorder: {hint}"


def is_loopback(host: str) -> bool:
    """Return True for a loopback address or `localhost`. Names are not resolved."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
