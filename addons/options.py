"""Options of the recorder: name, type, default, choices and help of each, in one place.

mitmdump declares and reads them, the trainer checks them before it starts mitmdump, and the table of
recipes/site/pages/recording.md is their help. The file imports the standard library alone: the trainer checks options
without mitmproxy.
"""

import difflib
import ipaddress
import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, get_args
from urllib.parse import urlsplit

from rolltap.addons.errors import InputError

if TYPE_CHECKING:
    from mitmproxy.addonmanager import Loader
    from mitmproxy.optmanager import OptManager

PREFIX = "rolltap_"
"""Begins the names of the recorder's own options. All others are mitmproxy's."""
Sync = Literal["never", "session", "call"]
"""Time when commits are synced (`fdatasync`): `call`, before a reply ends; `session`, when a session ends; `never`.

A killed process loses no commit in any case. A machine crash may lose with `call` the events and the failed or aborted
calls of sessions that have not ended, with `session` all commits of such sessions, with `never` every commit that the
system has not written back."""
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
"""Samples from the unmodified policy, so that sampled tokens follow the recorded log-probabilities. Each call sends all
of them, because vLLM takes missing ones from the model's generation_config.json."""
_SAMPLING_BOUNDS = {
    "temperature": (0.0, 2.0),
    "top_p": (sys.float_info.min, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (sys.float_info.min, sys.float_info.max),
    "max_tokens": (1, 2**31 - 1),
    "seed": (-(2**63), 2**63 - 1),
}
"""The least and the greatest value that vLLM takes."""
_SAMPLING_KEYS = sorted(_SAMPLING_BOUNDS)
_KINDS = {str: "one text", int: "a whole number", bool: "true or false", list: "a list of texts"}
_ALIKE = 0.6
"""Least similarity of two names, as difflib counts it, to suggest one for the other."""


@dataclass(frozen=True, slots=True)
class Option:
    """An option as mitmproxy knows it."""

    default: Any
    """A text, a number, a flag or a list of texts. Its type is the option's."""
    help: str
    choices: tuple[str, ...] = ()
    required: bool = False
    live: bool = False
    """True if it may change while a run is recorded."""
    parse: Callable[[Any], Any] = lambda value: value
    """From mitmproxy's value to the field's. Raises ValueError with the end of a sentence that begins with the name."""

    def value(self, given: Any) -> Any:
        """Return mitmproxy's value of texts of `--set`, or of one in its configuration file. Raises as `parse`."""
        kind = type(self.default)
        if type(given) is kind:
            return given
        match given:
            case [str(text)] if kind is str:
                return text
            case [] | ["" | "true"] if kind is bool:
                return True
            case ["false"] if kind is bool:
                return False
            case [str(text)] if kind is int and text.removeprefix("-").isdecimal():
                return int(text)
        shown = ", ".join(map(repr, given if isinstance(given, list) else [given]))
        raise ValueError(f"is {shown}: give {_KINDS[kind]}")

    def checked(self, value: Any) -> Any:
        """Return the field's value for mitmproxy's. Raises ValueError as `parse`."""
        if self.choices and value not in self.choices:  # mitmproxy checks them in its user interfaces only
            raise ValueError(f"is {value!r}: choose {', '.join(self.choices)}")
        if isinstance(value, int) and value < 0:
            raise ValueError(f"is {value}: give 0 or more")
        return self.parse(value)


def _option(default: Any, text: str, **more: Any) -> Any:
    option = Option(default, text, **more)
    return field(default_factory=lambda: option.parse(option.default), metadata={"option": option})


def _folder(text: str) -> Path:
    return Path(text).expanduser()


def engine_urls(text: str) -> tuple[str, ...]:
    """Return the URLs of engines in a text with commas between them. Raises `ValueError`."""
    urls = tuple(url.strip() for url in text.split(",") if text)
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


def _sampling(text: str) -> dict[str, Any]:
    try:
        sampling = json.loads(text)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(sampling, dict):
        raise ValueError(f"is {text!r}: give a JSON object")
    for key, value in sampling.items():
        if key not in _SAMPLING_KEYS:
            raise ValueError(f"has the unknown key {key!r}: use {', '.join(_SAMPLING_KEYS)}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
            raise ValueError(f"has {key} = {value!r}: give a number")
        least, most = _SAMPLING_BOUNDS[key]
        if not least <= value <= most:
            raise ValueError(f"has {key} = {value!r}, which vLLM refuses: give a number from {least:g} to {most:g}")
        if key in ("top_k", "max_tokens", "seed") and value != int(value):
            raise ValueError(f"has {key} = {value!r}: give a whole number")
    return {**NEUTRAL_SAMPLING, **sampling}


class RecordedFrom(NamedTuple):
    """The recorded session whose calls answer the requests; those that began at `until` or later are sampled."""

    run: Path
    session: str
    until: datetime | None = None

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Self:
        """Return what `as_json` has returned. Raises `KeyError`, `ValueError`, `TypeError` and `AttributeError`."""
        until = given.get("until")
        return cls(Path(given["run"]), given["session"], None if until is None else datetime.fromisoformat(until))

    def as_json(self) -> dict[str, str]:
        """Return a value for JSON."""
        where = {"run": str(self.run), "session": self.session}
        return where if self.until is None else {**where, "until": self.until.isoformat()}


def _recorded_from(text: str) -> RecordedFrom | None:
    try:
        given = json.loads(text or "null")
        return given and RecordedFrom.of(given)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f'is {text!r}: give a JSON object such as {{"run": "runs/a", "session": "s1"}}') from error


@dataclass(frozen=True)
class RecorderOptions:
    """Options of the recorder. A field `NAME` is mitmproxy's option `rolltap_NAME`."""

    out: Path = _option("", "Run folder to record to. Created if it does not exist.", required=True, parse=_folder)
    engine: tuple[str, ...] = _option(
        "",
        "Base URL of the vLLM server, for instance `http://127.0.0.1:8000`. Separate several servers of the same model "
        "with commas.",
        required=True,
        parse=engine_urls,
    )
    model: str = _option(
        "",
        "Model whose tokenizer is used: a folder or a Hugging Face name. Must be the model that the engine serves.",
        required=True,
    )
    renderer: str = _option(
        "auto",
        "Renderer from conversations to token ids: a name of the `renderers` library, for instance `qwen3`, or `auto` "
        "to find the one that agrees with the model's chat template.",
    )
    tool_parser: str = _option(
        "auto",
        "Reader of tool calls and reasoning in replies: a family in `addons/prompts/families.toml`, for instance "
        "`hermes`, or `auto` to find the one that reads what the model's prompts write.",
    )
    sampling: Mapping[str, Any] = _option(
        "{}",
        'Sampling parameters of all calls, a JSON object such as `{"temperature": 0.7}`. Keys: '
        f"{', '.join(_SAMPLING_KEYS)}. Missing keys are neutral: temperature 1, top_p 1, no top_k, no penalties. Only "
        "the token limit, stop texts and JSON schema of a harness's request are applied; its sampling parameters are "
        "recorded.",
        parse=_sampling,
    )
    allow: tuple[str, ...] = _option(
        [],
        "Host that sessions may reach: a name or a pattern with `*` and `?`, for instance `pypi.org` or "
        "`*.pythonhosted.org`. It stands for the ports 80 and 443, `pypi.org:8443` for another, `pypi.org:*` for all. "
        "No connection is made to a private or loopback address, unless a pattern is that very address or "
        "`localhost`. Repeat the option for more hosts. Model calls to any host are answered by the recorder and never "
        "reach their host; a host that is named without a wildcard keeps the paths of its own which end as those of a "
        "model API (the run gets an event `uncaptured` for a possible model call). Other requests to other hosts get "
        "404, and the run gets an event.",
        live=True,
        parse=tuple,
    )
    images: Images = _option(
        "hide",
        "Treatment of images, audio and files in a conversation. `hide`: a text such as `[image/png, not shown: this "
        "model reads text]` stands in their place, and the run gets an event (`hidden`). `refuse`: the request gets an "
        "error of its API.",
        choices=get_args(Images),
    )
    secret_file: str = _option(
        "",
        "File, or `/dev/fd/NUMBER`, with the key of the sessions' proxy passwords. A password is the hexadecimal "
        "HMAC-SHA256 of the session id. The file is read once; other users must not be able to read it. Required "
        "unless the proxy listens on loopback. If not set, any password is accepted.",
        live=True,
    )
    engine_key_file: str = _option(
        "",
        "File with the key of the engines, one for all, or `/dev/fd/NUMBER`. By default the file that the environment "
        "variable `ROLLTAP_ENGINE_KEY_FILE` names, if any. `rolltap serve` makes it.",
    )
    patience: int = _option(
        120,
        "Seconds after an engine failure, at first contact too, during which a call is retried. A newly sampled token "
        "resets it. A retry continues after the last sampled token. When it is used up, the harness gets an error.",
    )
    keep_adapter: bool = _option(
        True,
        "A session keeps the LoRA adapter with which its first call was sampled, though newer ones are published, so "
        "that its prefix cache in the engine stays. When false, each request gets the newest adapter. A restarted "
        "recorder finds an adapter again only under the name `policy-VERSION`, as rolltap publishes it.",
    )
    fsync: Sync = _option(
        "session",
        "Time when recorded calls are synced to disk: `call`, before a reply ends; `session`, when a session ends; "
        "`never`, left to the operating system. A killed recorder loses no committed call in any case. A machine crash "
        "can lose calls that are not synced.",
        choices=get_args(Sync),
    )
    routing: bool = _option(
        False,
        "Record the experts that the engine chose for each token, so that a training can choose the same "
        '(`grpo.routing = "recorded"`). The engine needs `rolltap serve --routing`. A token takes one byte for each '
        "chosen expert in each layer, two bytes with more than 256 experts.",
    )
    max_calls: int = _option(0, "Budget of model calls of a session. Failed ones do not count. 0 is no budget.")
    max_sampled_tokens: int = _option(
        0, "Budget of tokens that are sampled for a session. The last reply is cut. 0 is no budget."
    )
    max_prompt_tokens: int = _option(
        0,
        "Budget of prompt tokens of one call. A longer one gets its API's error for a full context window. 0 is no "
        "budget.",
    )
    accept_rewards: bool = _option(
        False,
        "Accept a reward with the request that ends a session: a POST through the proxy to "
        "`http://session.rolltap/end` with a JSON object of the keys reward, parts, task and group. Only for programs "
        "that you trust: a harness knows its session's credentials, and can send a reward of its own.",
    )
    rerun: RecordedFrom | None = _option(
        "",
        "Recorded session whose calls answer the requests, as `rolltap rerun` sets it: a JSON object such as "
        '`{"run": "runs/a", "session": "s1"}`. `rolltap_engine` is then the session\'s and gets no request. '
        "With the key `until`, a time, calls that began then or later are sampled, as `rolltap fork` sets it.",
        parse=_recorded_from,
    )
    ready: str = _option(
        "",
        "File, or `/dev/fd/NUMBER`, to write the proxy's address to once it listens: one line of JSON with the keys "
        "`host`, `port` and `warnings`, a list of texts about the model and the engines.",
        live=True,
    )

    @classmethod
    def load(cls, loader: "Loader") -> None:
        """Declare the options to mitmproxy."""
        for name, option in OPTIONS.items():
            kind = Sequence[str] if isinstance(option.default, list) else type(option.default)
            loader.add_option(name, kind, option.default, option.help, option.choices or None)

    @classmethod
    def read(cls, options: "OptManager") -> Self:
        """Return the options that mitmdump has. Raises mitmproxy's `OptionsError` with a line for each wrong one."""
        from mitmproxy.exceptions import OptionsError

        values, wrong = _checked({name: getattr(options, name) for name in OPTIONS})
        if wrong:
            raise OptionsError("\n".join(wrong))
        return cls(**{name.removeprefix(PREFIX): value for name, value in values.items()})


OPTIONS: Mapping[str, Option] = {PREFIX + each.name: each.metadata["option"] for each in fields(RecorderOptions)}
"""Name of mitmproxy's option -> option."""


def require_options(given: Mapping[str, str | Sequence[str]], where: str = "") -> None:
    """Refuse options of a recorder that is not started yet: unknown names, and values that it would refuse.

    A repeated option has a list of values. `where` is written before a name. mitmproxy's own options are left to
    mitmdump. Raises `InputError` with a line for each.
    """
    values, wrong = typed({name: [value] if isinstance(value, str) else [*value] for name, value in given.items()})
    wrong += _checked(values)[1]
    if wrong:
        raise InputError("\n".join(where + refusal for refusal in wrong))


def typed(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return mitmproxy's values of the recorder's options in `given`, and a refusal of each wrong name or type.

    A value is a list of texts, as `--set` collects them, or a value of mitmproxy's configuration file.
    """
    values, wrong = {}, []
    for name, value in given.items():
        if name.startswith(PREFIX) and name not in OPTIONS:
            wrong.append(unknown(name, OPTIONS))
        elif name in OPTIONS:
            try:
                values[name] = OPTIONS[name].value(value)
            except ValueError as error:
                wrong.append(f"{name} {error}")
    return values, wrong


def _checked(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of fields for those of mitmproxy, and a refusal of each wrong one."""
    parsed, wrong = {}, []
    for name, value in values.items():
        if OPTIONS[name].required and not value:
            wrong.append(f"{name} is not set: add --set {name}=...")
            continue
        try:
            parsed[name] = OPTIONS[name].checked(value)
        except ValueError as error:
            wrong.append(f"{name} {error}")
    return parsed, wrong


def unknown(name: str, known: Collection[str]) -> str:
    """Return the refusal of a name, with the one of the `known` ones that resembles it, if there is one."""
    # without the prefix: it makes all of them alike
    own = {each.removeprefix(PREFIX): each for each in sorted(known)}
    near = difflib.get_close_matches(name.removeprefix(PREFIX), own, 1, _ALIKE)
    hint = f"did you mean {own[near[0]]}?" if near else "`mitmdump -s $(rolltap addon) --options` lists them"
    return f"{name} is no option of the recorder: {hint}"


def is_loopback(host: str) -> bool:
    """Return True for a loopback address or `localhost`. Names are not resolved."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
