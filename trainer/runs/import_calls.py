"""Import of calls from other sources: JSON Lines into a new run folder.

The file is read twice. The first pass checks every line and notes its byte offset by session. The
second pass links and writes one session after the other. Memory: the tokens of one session, and the
ids of all calls. The lines may be in any order.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from rolltap.addons.errors import InputError, MissingPackageError, install_command
from rolltap.addons.store.metadata import RUN_FILE, tokenizer_digests, write_metadata
from rolltap.addons.store.records import (
    Call,
    CallRole,
    CallStatus,
    Session,
    SessionStatus,
    VersionSpan,
    find_violation,
    utc_now,
)
from rolltap.addons.store.staging import new_folder
from rolltap.addons.store.tables import RunWriter
from rolltap.addons.store.untrusted import LARGEST_NUMBER, MOST_NAME, is_name
from rolltap.trainer.console import Advance
from rolltap.trainer.toml import describe
from rolltap.trainer.traces.tree import link_calls, start_order

_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "config.json")
"""Files of which a folder with a tokenizer has one: without any, transformers says much and nothing
of the folder."""


Report = Callable[[int, str], None]
"""Callback for each bad line: its number, from 1, and what is wrong with it."""

_SESSION_FIELDS = ("task_id", "group_id", "harness", "reward")


def _in_utc(time: datetime) -> datetime:
    if time.tzinfo is None:
        return time.replace(tzinfo=UTC)
    try:
        return time.astimezone(UTC)
    except OverflowError:
        raise ValueError("the year is out of range") from None


def _printable(name: str) -> str:
    if not is_name(name):
        raise ValueError(f"give printable text of at most {MOST_NAME} characters")
    return name


TokenIds = list[Annotated[int, Field(ge=0, le=2**31 - 1)]]
Name = Annotated[str, Field(min_length=1), AfterValidator(_printable)]
Number = Annotated[float, Field(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER)]


class ImportLine(BaseModel):
    """One line is one call. Keys with a default may be left out. A session's lines must not
    contradict each other."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    session_id: Name
    call_id: Name
    prompt_ids: Annotated[TokenIds, Field(min_length=1)]
    """The full prompt, shape (P,), with the tokens of earlier calls."""
    completion_ids: TokenIds
    """The sampled tokens, shape (C,)."""
    logprobs: list[float] | None
    """Natural-log probabilities of the sampled tokens, shape (C,); null when they are not known."""
    finish_reason: str | None
    task_id: str | None = None
    group_id: str | None = None
    """Group of the session. When no line gives one, the session id: the session is then a group of
    its own."""
    harness: str | None = None
    reward: Number | None = None
    started_at: Annotated[datetime, AfterValidator(_in_utc)] | None = None
    """ISO 8601. UTC when no zone is given; the time of the import when left out."""
    role: CallRole = "agent"
    status: CallStatus = "completed"
    parent_id: str | None = None
    """Chooses between candidate parents with the same tokens. Ignored when it is not one of the
    candidates."""
    policy_version: str = "unknown"

    def to_call(self, imported_at: datetime) -> Call:
        """Return the call, not linked to its parent yet. Log-probabilities are rounded to float32,
        as stored."""
        with np.errstate(over="ignore"):
            logprobs = np.array(self.logprobs or [], np.float32).tolist()
        sampled = len(self.completion_ids)
        spans: list[VersionSpan] = []
        if sampled:
            spans.append(VersionSpan(version=self.policy_version, start=0, end=sampled))
        violation = None
        if self.logprobs is not None:
            violation = find_violation(self.completion_ids, logprobs, spans)
        changed = {*_SESSION_FIELDS, "logprobs", "started_at", "policy_version"}
        return Call(
            **self.model_dump(exclude=changed),
            logprobs=logprobs,
            weight_versions=spans,
            kind_reason="imported",
            violation=violation,
            started_at=self.started_at or imported_at,
        )


@dataclass(slots=True)
class ImportSummary:
    """Counts of what an import wrote, and of the bad lines that it skipped."""

    sessions: int = 0
    calls: int = 0
    bridged: int = 0
    """Calls that continue another call; the others are roots of a call tree."""
    sampled_tokens: int = 0
    violations: int = 0
    """Calls whose tokens break an invariant: kept, marked and not trained on."""
    without_logprobs: int = 0
    """Calls with sampled tokens but without log-probabilities: kept and not trained on."""
    skipped: int = 0
    """Bad lines."""

    def add(self, calls: Sequence[Call]) -> None:
        """Count the calls of one session."""
        self.sessions += 1
        for call in calls:
            self.calls += 1
            self.sampled_tokens += len(call.completion_ids)
            if call.kind == "bridged":
                self.bridged += 1
            if call.violation is not None:
                self.violations += 1
            if call.completion_ids and not call.logprobs:
                self.without_logprobs += 1

    def __rich__(self) -> str:
        counts = f"{self.calls} calls of {self.sessions} sessions, {self.sampled_tokens} sampled"
        lines = [f"{counts} tokens", f"{self.bridged} calls continue another one"]
        notes = {
            "calls break an invariant: kept, marked and not trained on": self.violations,
            "calls have no log-probabilities: kept and not trained on": self.without_logprobs,
            "bad lines were skipped": self.skipped,
        }
        for note, count in notes.items():
            if count:
                lines.append(f"{count} {note}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the summary as JSON values."""
        return asdict(self)


@dataclass(slots=True)
class _Session:
    """Notes of the first pass about a session."""

    lines: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Call id -> number and byte offset of its line."""
    given: dict[str, Any] = field(default_factory=dict)
    """Field of the session -> its value."""
    givers: dict[str, int] = field(default_factory=dict)
    """Field of the session -> number of the first line that gives it."""

    def add(self, line: ImportLine, number: int, offset: int) -> str | None:
        """Note a line. When it contradicts an earlier one, return how, and note nothing."""
        if line.call_id in self.lines:
            first, _ = self.lines[line.call_id]
            return f"call_id {line.call_id!r} of session {line.session_id!r} is in line {first} too"
        given = line.model_dump(include=set(_SESSION_FIELDS), exclude_none=True)
        for name, value in given.items():
            known = self.given.get(name, value)
            if value != known:
                first = self.givers[name]
                return (
                    f"{name} is {value!r}, but line {first} of session {line.session_id!r} says"
                    f" {known!r}"
                )
        self.lines[line.call_id] = (number, offset)
        for name, value in given.items():
            self.given.setdefault(name, value)
            self.givers.setdefault(name, number)
        return None


def import_calls(
    source: BinaryIO,
    run: Path,
    *,
    skip_bad: bool,
    report: Report,
    advance: Advance,
    model: str | None = None,
) -> ImportSummary:
    """Write the calls in `source`, one JSON object a line, to the new run folder `run`.

    `model` is the folder or name of the model whose tokens they are. The run then merges only with
    runs of its tokenizer, and is not trained with another one.

    Atomic: `run` is created with every good line, or not at all when this raises or is killed. The
    order of the lines does not matter: calls are sorted by `start_order`.

    Raises `InputError` when there is no line, when a line is bad and `skip_bad` is false, when
    `source` changes between the passes, and when `run` is a run already. Also raises as
    `new_folder` and `named_model`.
    """
    imported_at = utc_now()
    if (run / RUN_FILE).exists():
        merge = f"`rolltap merge {run} NEW --out MERGED`"
        raise InputError(f"{run} is a run already: import into a new folder NEW, then {merge}")
    metadata: dict[str, Any] = {"source": "import"}
    if model is not None:
        names, _ = named_model(model)
        metadata |= names
    bad = 0
    first = ""

    def note(number: int, fault: str) -> None:
        nonlocal bad, first
        bad += 1
        first = first or f"line {number}: {fault}"
        report(number, fault)

    with _seekable(source) as lines, new_folder(run) as staged:
        sessions = _check(lines, note, advance)
        if bad and not skip_bad:
            raise InputError(
                f"{bad} bad lines, nothing was imported; {first}; "
                "correct them, or skip them (--skip-bad, skip_bad=True)"
            )
        if bad and not sessions:
            raise InputError(f"there is no line to import: all {bad} are bad; {first}")
        if not sessions:
            raise InputError("there is no line to import")
        write_metadata(staged, metadata)
        summary = ImportSummary(skipped=bad)
        with RunWriter(staged, "never") as writer:
            for done, (session_id, noted) in enumerate(sessions.items(), start=1):
                calls = [line.to_call(imported_at) for line in _read(lines, noted)]
                for call in link(calls):
                    writer.add_call(call)
                writer.add_session(_session(session_id, noted, calls))
                writer.end_session()
                summary.add(calls)
                advance("sessions written", done, len(sessions))
    return summary


@contextmanager
def _seekable(source: BinaryIO) -> Iterator[BinaryIO]:
    """Yield `source` itself, or a temporary copy of it when it is not seekable, for example a
    pipe."""
    if source.seekable():
        yield source
        return
    with tempfile.TemporaryFile() as spool:
        shutil.copyfileobj(source, spool)
        yield spool


def _check(lines: BinaryIO, report: Report, advance: Advance) -> dict[str, _Session]:
    """Return session id -> notes about its good lines. Report the bad ones.

    A line is compared only with good lines before it.
    """
    sessions: dict[str, _Session] = {}
    size = lines.seek(0, os.SEEK_END)
    start = lines.seek(0)
    for number, text in enumerate(lines, start=1):
        offset = start
        start += len(text)
        advance("lines read", start, size)
        if not text.strip():
            continue
        try:
            line = ImportLine.model_validate_json(text)
        except ValidationError as error:
            report(number, describe(error))
            continue
        noted = sessions.setdefault(line.session_id, _Session())
        fault = noted.add(line, number, offset)
        if fault is not None:
            report(number, fault)
    return sessions


def _read(lines: BinaryIO, noted: _Session) -> Iterator[ImportLine]:
    for _, offset in noted.lines.values():
        lines.seek(offset)
        try:
            yield ImportLine.model_validate_json(lines.readline())
        except ValidationError as error:
            raise InputError(f"the file changed while it was read: {describe(error)}") from error


def link(calls: list[Call]) -> list[Call]:
    """Sort calls by `start_order`, and set the parent and the shared prefix of each. Return
    `calls`."""
    calls.sort(key=start_order)
    parents, _ = link_calls(calls)
    for call, number in zip(calls, parents, strict=True):
        call.parent_id = None
        if number is not None:
            parent = calls[number]
            call.parent_id = parent.call_id
            call.prefix_length = len(parent.prompt_ids) + len(parent.completion_ids)
            call.kind = "bridged"
            call.kind_reason = None
    return calls


def _session(session_id: str, noted: _Session, calls: Sequence[Call]) -> Session:
    """Return the session's row. Its status is `failed` when none of its calls is completed."""
    status: SessionStatus = "failed"
    policy_version = None
    for call in reversed(calls):  # the version of the first call that sampled a token counts
        if call.status == "completed":
            status = "completed"
        if call.weight_versions:
            policy_version = call.weight_versions[0].version
    fields = {"group_id": session_id, **noted.given}
    return Session(
        session_id=session_id,
        status=status,
        policy_version=policy_version,
        started_at=calls[0].started_at,
        **fields,
    )


def named_model(model: str) -> tuple[dict[str, Any], Any]:
    """Return the entries of `run.json` that a recorder writes for a model, given by its folder or
    name; its tokenizer.

    The entries are its name, and the digests of its tokenizer and chat template.

    Raises `MissingPackageError` without transformers, and `InputError` when there is no tokenizer.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingPackageError(
            f"the tokenizer needs transformers ({error}): {install_command('record')}"
        ) from error
    folder = Path(model).expanduser()
    name = str(folder.resolve()) if folder.is_dir() else model
    if folder.is_dir() and not any((folder / file).exists() for file in _TOKENIZER_FILES):
        files = ", ".join(_TOKENIZER_FILES)
        raise InputError(
            f"the folder {model} has none of {files}: give the folder or name of a model"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise InputError(
            f"model {model}: no tokenizer can be loaded: {error}; give its folder or name"
        ) from error
    digests = tokenizer_digests(tokenizer.get_vocab(), tokenizer.chat_template)
    return {"model": name, **digests}, tokenizer
