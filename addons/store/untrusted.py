"""Bounds of what is read of a run folder that nobody vouches for: people send them to each other.

- **Files** are regular ones that no link leads to. They are opened without waiting, so that a FIFO
  hangs nobody.
- **Commits** are as large as they are on the disk: writers compress none. They have at most
  `most_bytes()` bytes and `MOST_ROWS` rows, texts of at most `MOST_TEXT` bytes and lists of at most
  `MOST_NUMBERS` numbers, and printable ids. `SegmentReader` takes others for damage, and skips
  them.
- **Rows** have the values that their columns are for (`row_faults`): JSON of the right shape,
  finite numbers, known words. `batch_rows` reads other values as those of an empty record. The
  row's digest then does not match, so that nothing is trained on it.
"""

import errno
import json
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pydantic
from pydantic import BaseModel, Field, InstanceOf, Json, ValidationError
from pydantic_core import ErrorDetails

from rolltap.addons.store.records import LATER_COLUMNS, Call, Event, Session

MOST_MIB = "ROLLTAP_MOST_MIB"
"""Variable with the MiB of the largest commit, and of the largest file that is read as a whole."""
MOST_ROWS = 65_536
MOST_TEXT = 64 << 20
"""Bytes of a text: twice the largest request of a recorder."""
MOST_NUMBERS = 1 << 22
MOST_NAME = 1_000
"""Characters of an id."""
LARGEST_NUMBER = 1e12
"""Largest reward. Sums and squares of such numbers are finite."""
_SMALL = 1 << 20
"""Bytes of a batch in which nothing is too long."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def most_bytes() -> int:
    """Return the largest size of a commit, and of a file that is read as a whole."""
    given = os.environ.get(MOST_MIB, "")
    return (int(given) if given.isdecimal() else 256) << 20


def open_file(run: Path, name: str) -> BinaryIO:
    """Open a file of a run folder. `name` is its path in the folder.

    Raises `OSError`, also for a link, for a file that is no regular one, and for a name that no
    file can have.
    """
    path = str(run / name)
    *folders, last = Path(name).parts or ("",)
    if ".." in folders or Path(name).is_absolute():
        raise OSError(errno.EINVAL, "it is not in the run folder", path)
    folder = os.open(run, _FOLDER)
    try:
        for part in folders:
            inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        descriptor = os.open(last, _FILE, dir_fd=folder)
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error), repr(path)) from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link: put the file itself there", path) from error
        raise
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", path)
    return os.fdopen(descriptor, "rb")


def read_file(run: Path, name: str) -> bytes:
    """Return the contents of a file of a run folder.

    Raises `OSError` as `open_file`, and for one that is too large.
    """
    with open_file(run, name) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes():
            why = f"it has {size:,} bytes: set {MOST_MIB} to read it"
            raise OSError(errno.EFBIG, why, str(run / name))
        return file.read(size)


def parse_object(text: bytes, kind: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises `ValueError` for another value, and for fields that `kind` has not.
    """
    try:
        kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(": ".join([*map(str, first["loc"]), first["msg"]])) from None
    values: dict[str, Any] = json.loads(text)
    return values


def check_message(message: pa.Message) -> None:
    """Raise `pa.ArrowInvalid` for the message of a commit that is compressed or too large.

    Reads its metadata alone. pyarrow has verified the metadata, a flatbuffer, of which it does not
    show the compression and the number of rows.
    """
    data = message.metadata.to_pybytes()
    root = _pointer(data, 0)
    header = _fields(data, root)[2]
    rows, _, _, *compression = _fields(data, _pointer(data, header))
    num_rows = 0
    if rows:
        (num_rows,) = struct.unpack_from("<q", data, rows)
    if any(compression[:1]):
        raise pa.ArrowInvalid("it is compressed, and no writer compresses")
    if message.body.size > most_bytes():
        raise pa.ArrowInvalid(f"it has {message.body.size:,} bytes: set {MOST_MIB} to read it")
    if num_rows > MOST_ROWS:
        raise pa.ArrowInvalid(f"it has {num_rows:,} rows, at most {MOST_ROWS:,} are read")


def _pointer(data: bytes, place: int) -> int:
    """Return the place that the flatbuffer's offset at a place leads to."""
    (offset,) = struct.unpack_from("<I", data, place)
    return int(place + offset)


def _fields(data: bytes, table: int) -> list[int]:
    """Return the places of the fields of a flatbuffer's table, 0 for one that is not there."""
    (offset,) = struct.unpack_from("<i", data, table)
    vtable = table - offset
    (size,) = struct.unpack_from("<H", data, vtable)
    offsets = struct.unpack_from(f"<{size // 2 - 2}H", data, vtable + 4)
    return [table + offset if offset else 0 for offset in offsets]


def check_batch(batch: pa.RecordBatch) -> None:
    """Raise `pa.ArrowInvalid` for a value that is too long, and for an id that is no name."""
    if batch.nbytes > _SMALL:
        for name in batch.schema.names:
            _check_lengths(name, batch.column(name))
    for name in {"session_id", "call_id"} & {*batch.schema.names}:
        for value in batch.column(name).to_pylist():
            if value is not None and not is_name(value):
                what = f"is not printable text of at most {MOST_NAME} characters"
                raise pa.ArrowInvalid(f"the {name} {value[:50]!r} {what}")


def _check_lengths(name: str, column: pa.Array) -> None:
    if pa.types.is_list(column.type):
        lengths = pc.list_value_length(column)
        most = MOST_NUMBERS
    elif pa.types.is_string(column.type):
        lengths = pc.binary_length(column)
        most = MOST_TEXT
    else:
        return
    longest = pc.max(lengths).as_py() or 0
    if longest > most:
        what = f"has a value of length {longest:,}, at most {most:,} is read"
        raise pa.ArrowInvalid(f"its {name} {what}")


def is_name(text: str) -> bool:
    """Return True for a text that can be the id of a session or a call."""
    return len(text) <= MOST_NAME and text.isprintable()


Number = Annotated[float, Field(strict=True, ge=-LARGEST_NUMBER, le=LARGEST_NUMBER)]
Count = Annotated[int, Field(strict=True, ge=0)]
Seconds = Annotated[float, Field(strict=True, ge=0, le=LARGEST_NUMBER)]


class _Function(BaseModel):
    name: str
    arguments: Any


class _ToolCall(BaseModel):
    function: _Function


class _Message(BaseModel):
    role: str
    content: str | list[Any] | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _SampledFunction(_Function):
    arguments: str


class _SampledCall(BaseModel):
    function: _SampledFunction


class _Reply(BaseModel):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_SampledCall] | None = None


class _Tool(BaseModel):
    function: dict[str, Any] = {}


class _Sampling(BaseModel):
    asked: dict[str, Any] = {}
    temperature: Number | None = None
    stop: list[str] | None = None


class Span(BaseModel):
    """A span of tokens, of which each table has some of the fields."""

    start: Count
    end: Count
    version: str = ""
    call_id: str = ""


def _row_of(record: type, **columns: Any) -> type[BaseModel]:
    """Return what the rows of a record hold: values of its fields' types, but for some `columns`.

    A row may lack a column. It was not asked for then.
    """
    kinds = {each.name: each.type for each in fields(record)} | columns
    with_default: dict[str, Any] = {name: (kind, None) for name, kind in kinds.items()}
    return pydantic.create_model(record.__name__, **with_default)


TokenIds = InstanceOf[list[int]]
Logprobs = InstanceOf[list[float]]
_CALL = _row_of(
    Call,
    prompt_length=Count,
    prompt_tail_ids=TokenIds,
    completion_ids=TokenIds,
    logprobs=Logprobs | None,
    weight_versions=list[Span] | None,
    sampling=Json[_Sampling],
    messages=Json[list[_Message]],
    tools=Json[list[_Tool]] | None,
    reply=Json[_Reply] | None,
    cached_tokens=Count | None,
)
_SESSION = _row_of(
    Session,
    reward=Number | None,
    parts=Json[dict[str, Number]],
    evidence=Json[dict[str, Any]],
    suspicions=Json[dict[str, Count]],
    revision=Count,
    **dict.fromkeys(LATER_COLUMNS, Seconds | None),
)
_EVENT = _row_of(Event)
_OBJECT_EVENT = _row_of(Event, detail=Json[dict[str, Any]])
"""An event whose detail is a JSON object."""


class _RoutingRow(BaseModel):
    session_id: str
    call_id: str
    first: Count
    layers: Count
    top_k: Count
    expert_bytes: Literal[1, 2]
    experts: bytes
    missing: str | None

    @pydantic.model_validator(mode="after")
    def _whole(self) -> "_RoutingRow":
        size = self.layers * self.top_k * self.expert_bytes
        if self.missing is None and (not size or len(self.experts) % size):
            number = len(self.experts)
            raise ValueError(f"its {number} bytes of experts are not {size} for each token")
        return self


ROWS: dict[str, type[BaseModel]] = {
    "messages": _CALL,
    "revision": _SESSION,
    "detail": _EVENT,
    "at": _EVENT,
    "experts": _RoutingRow,
}
"""A column that no other table has -> what the rows of its table hold."""
_OBJECTS = ("session_started", "rerun", "stored")
"""Events whose detail is a JSON object."""


@cache
def _model(columns: tuple[str, ...]) -> type[BaseModel]:
    """Return what rows with these columns hold: anything, without the column of a table."""
    for own, model in ROWS.items():
        if own in columns:
            return model
    return BaseModel


def row_faults(row: Mapping[str, Any]) -> dict[str, str]:
    """Return column -> what is wrong with its value, for values that no writer writes.

    A fault of a row as a whole has an empty name.
    """
    model = _model(tuple(row))
    if model is _EVENT and row.get("kind") in _OBJECTS:
        model = _OBJECT_EVENT
    try:
        model.model_validate(row)
    except ValidationError as error:
        faults: dict[str, str] = {}
        for fault in error.errors():
            place = [str(part) for part in fault["loc"]]
            column = place[0] if place else ""
            faults.setdefault(column, _described(row.get(column), place, fault))
        return faults
    return {}


def _described(value: object, place: list[str], fault: ErrorDetails) -> str:
    """Say what is wrong with a row at the place of a fault, which begins with the column."""
    if not place:
        return fault["msg"]
    column, *within = place
    if within:
        what = f"a wrong value ({'.'.join(within)})"
    elif isinstance(value, float) or fault["type"] == "literal_error":
        return f"its {column} is {str(value)[:MOST_NAME]!r}"
    else:
        what = "a wrong value"
    return f"its {column} have {what}: {fault['msg']}"[:MOST_NAME]
