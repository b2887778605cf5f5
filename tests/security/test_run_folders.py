"""A run folder of somebody else costs a message: no wait, no memory beyond its size, no
traceback."""

import json
import os
import re
import shutil
import subprocess
import sys

import pyarrow as pa
import pytest

from rolltap.addons.errors import RunError
from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.records import DIGEST
from rolltap.addons.store.rows import row_digest
from rolltap.addons.store.segment import SegmentReader
from rolltap.addons.store.tables import TABLES, read_rows, run_files
from rolltap.addons.store.untrusted import open_file
from rolltap.trainer.reruns.record import Record
from rolltap.trainer.traces.reader import load_sessions
from rolltap.trainer.traces.sessions import Totals, TraceOptions, iter_traces
from tests.deep import DEEP, cases
from tests.security.run_folders import (
    ENGINE,
    ROWS,
    add_row,
    attempt,
    commands,
    damage,
    sound_run,
    verify,
)

NESTED = '{"a":' * 100_000 + "1" + "}" * 100_000
VALUES = r"""
calls.messages: [<nested>]
calls.messages: null
calls.messages: [1]
calls.messages: [{"content": "no role"}]
calls.messages: [{"role": "user", "tool_calls": [{}]}]
calls.messages: [{"role": "user", "content": "\ud800"}]
calls.messages: no JSON
calls.messages = null
calls.reply: <nested>
calls.reply: null
calls.reply: ["text"]
calls.reply: {"content": 5}
calls.reply: {"tool_calls": [{"function": {"name": "bash", "arguments": {"command": "ls"}}}]}
calls.reply: {"content": "a\udfff"}
calls.tools: [1]
calls.tools: [{"function": null}]
calls.sampling: []
calls.sampling: {"temperature": 1e999}
calls.prompt_length = 2147483647
calls = {"prompt_length": 2147483647, "parent_id": "a", "call_id": "z"}
calls.prompt_length = -1
calls.prompt_tail_ids = null
calls.prompt_tail_ids = [null]
calls.completion_ids = null
calls.call_id = null
calls.call_id = "a\u0000b"
calls.session_id: <long>
calls.started_at = null
calls.status: model_config
calls.role = null
calls.weight_versions = [{"version": null, "start": 0, "end": 1}]
calls.weight_versions = [{"version": "1", "start": -2147483648, "end": 2147483647}]
sessions.session_id = "a\u0000b"
sessions.session_id = "a\u001b[2Jb"
sessions.reward = 1e308
sessions.reward = NaN
sessions.reward = -Infinity
sessions.parts: {"a": 1e308}
sessions.parts: {"a": true}
sessions.parts: {"a": "1"}
sessions.parts = null
sessions.parts: {
sessions.evidence: []
sessions.evidence: <nested>
sessions.suspicions: {"rule": -1}
sessions.suspicions: {"rule": 0.5}
sessions.revision = 2147483647
sessions.revision = -1
sessions.status: copy
sessions.started_at = null
sessions.group_id = null
events = {"kind": "stored", "detail": "[]"}
events = {"kind": "session_started", "detail": "no JSON"}
events.kind: nothing
events.at = null
routing.expert_bytes = 7
routing.layers = 2147483647
routing.experts = null
scores.top_k = 5
scores.logprobs = null
trained.step = null
trained.spans = [{"call_id": "a", "start": -5, "end": null}]
""".strip().splitlines()
"""Values of a row with its own digest that no writer writes: a text, or JSON after `=`."""


@pytest.fixture
def run(tmp_path):
    return sound_run(tmp_path / "run")


def test_a_sound_run_is_read_by_everything(run, tmp_path):
    said = {name: attempt(read) for name, read in commands(run, tmp_path / "out").items()}
    assert "does not say what the engine" in said.pop("rerun")
    assert {*said.values()} == {None}
    assert verify(run).verdict == "ok"


def replace_rows(run, line):
    """Replace the rows of a table by one with values of `VALUES`. Return table and values."""
    place, sign, text = re.fullmatch(r"([\w.]+)(:| =) (.*)", line).groups()
    table, _, column = place.partition(".")
    value = text.replace("<nested>", NESTED).replace("<long>", "x" * 2_000)
    if sign == " =":
        value = json.loads(text)
    values = {column: value} if column else value
    for path in run_files(run, table):
        path.unlink()
    add_row(run, table, **values)
    return table, values


@pytest.mark.parametrize("line", VALUES)
def test_a_value_that_no_writer_writes_is_damage_that_is_named(run, line):
    table, values = replace_rows(run, line)
    [path] = run_files(run, table)
    found = damage(run)
    ours = [each for each in found if each.where.startswith(path.name)]
    by_call = ("the prompt has", "parent a is", "its rows of the")
    assert ours or [each for each in found if each.what.startswith(by_call)]
    if ours and values.keys() <= {"role", "status", "parts", "reward"}:
        assert f"its {next(iter(values))} " in ours[0].what


@pytest.mark.parametrize("line", cases(VALUES, 0, 12, 35))
def test_a_run_with_a_value_that_no_writer_writes_is_read_without_a_traceback(run, tmp_path, line):
    replace_rows(run, line)
    for read in commands(run, tmp_path / "out").values():
        attempt(read)


def test_nothing_is_trained_on_a_row_that_no_writer_writes(run):
    replace_rows(run, "calls.messages: [1]")
    replace_rows(run, "sessions.reward = 1e308")
    totals = Totals()
    for traced in iter_traces(run, TraceOptions()):
        totals.add(traced)
    assert totals.rewarded == 0
    assert totals.ledger.trained == 0
    assert totals.ledger.left_out == {"violation": 1}
    assert load_sessions(run)["s"].error == "its row was changed after it was written"


FILES = """run.json
metrics.jsonl
calls-1-1.arrow
sessions-1-1.arrow
trained-1-1.arrow
logs/s.log""".splitlines()


def device(path):
    path.symlink_to("/dev/zero")


def endless(path):
    path.touch()
    os.truncate(path, 1 << 40)


def nowhere(path):
    path.symlink_to("/nowhere")


def elsewhere(path):
    other = sound_run(path.with_name("other"))
    path.symlink_to(run_files(other, "calls")[0])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "make", cases([os.mkfifo, device, endless, os.mkdir, nowhere, elsewhere], 0, 1, 2)
)
def test_what_is_no_file_of_the_run_is_not_read(run, tmp_path, name, make):
    (run / name).unlink(missing_ok=True)
    (tmp_path / "out").mkdir()
    make(run / name)
    ways = commands(run, tmp_path / "out")
    said = {way: attempt(ways[way]) for way in (ways if DEEP else ("verify", "inspect", "view"))}
    if name == "run.json":
        assert said["verify"]
    elif name.endswith(".arrow"):
        assert not verify(run).sound


def test_a_folder_of_a_run_is_not_a_link(run, tmp_path):
    shutil.move(run / "logs", tmp_path / "others")
    (run / "logs").symlink_to(tmp_path / "others")
    with pytest.raises(OSError, match="Not a directory"):
        open_file(run, "logs/s.log")


@pytest.mark.parametrize(
    "text",
    [
        NESTED,
        "[]",
        '{"schema_version": 5, "engines": []}',
        '{"schema_version": 5, "model": 1}',
        "\0",
    ],
    ids=["nested", "a list", "engines", "a model", "a NUL"],
)
def test_metadata_of_another_form_is_a_message(run, text):
    (run / "run.json").write_text(text)
    with pytest.raises(RunError, match=r"run\.json"):
        read_metadata(run)


def test_the_metadata_of_a_record_set_the_limits_of_its_rerun_and_no_other_option(run, tmp_path):
    """`rolltap_allow` would let the program out."""
    limits = {"max_calls": 9, "allow": "*", "out": "/nowhere"}
    recorder = {"engines": [ENGINE], "limits": limits, "images": "hide"}
    engines = {ENGINE: {"max_model_len": 99}}
    metadata = {**read_metadata(run), "engines": engines, "recorders": [recorder]}
    (run / "run.json").write_text(json.dumps(metadata))
    rerun = Record.of(run, "s").rerun(tmp_path / "again", None, {})
    options = rerun._options
    assert "rolltap_allow" not in options
    assert options["rolltap_max_calls"] == ["9"]
    assert rerun.path == tmp_path / "again"


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_a_compressed_commit_is_not_unpacked(run, compression):
    """Gigabytes of a column are kilobytes when they are compressed."""
    path = run_files(run, "calls")[0]
    schema = TABLES["calls"]
    row = ROWS["calls"] | {"prompt_tail_ids": [0] * 4_000_000, "prompt_length": 4_000_000}
    row[DIGEST] = row_digest(row, schema)
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(str(path), schema, options=options) as writer:
        writer.write_batch(pa.RecordBatch.from_pylist([row], schema))
    assert path.stat().st_size < 200_000
    before = pa.total_allocated_bytes()
    [finding] = [finding for finding in verify(run).findings if finding.where.startswith(path.name)]
    assert "it is compressed, and no writer compresses" in finding.what
    assert pa.total_allocated_bytes() - before < 1_000_000


def test_the_limit_of_a_commit_is_raised_by_its_variable(run, monkeypatch):
    monkeypatch.setenv("ROLLTAP_MOST_MIB", "0")
    with SegmentReader(run_files(run, "calls")[0]) as reader:
        assert [*reader] == []
    assert "set ROLLTAP_MOST_MIB to read it" in next(iter(reader.damage.values()))
    monkeypatch.setenv("ROLLTAP_MOST_MIB", "1")
    assert len(list(read_rows(run, "calls"))) == 3


def last_offset(path, column):
    """Return the place in a file of the last offset of a column; None for a column without."""
    whole = pa.py_buffer(path.read_bytes())
    with SegmentReader(path) as reader:
        [(start, batch), *_] = reader
    kind = batch.schema.field(column).type
    if not (pa.types.is_string(kind) or pa.types.is_list(kind) or pa.types.is_binary(kind)):
        return None
    source = pa.BufferReader(whole)
    source.seek(start)
    read = pa.ipc.read_record_batch(pa.ipc.read_message(source), batch.schema)
    offsets = read.column(column).buffers()[1]
    return offsets.address - whole.address + 4 * batch.num_rows


@pytest.mark.parametrize("table", TABLES)
def test_an_offset_outside_of_its_buffer_is_damage_in_every_column(run, table):
    path = run_files(run, table)[0]
    whole = path.read_bytes()
    for column in TABLES[table].names:
        last = last_offset(path, column)
        if last is not None:
            path.write_bytes(whole[:last] + (2**30).to_bytes(4, "little") + whole[last + 4 :])
            assert not verify(run).sound, column
            path.write_bytes(whole)


READS_ALL = """
import sys
from pathlib import Path
from tests.security.run_folders import *
for read in commands(Path(sys.argv[1]), Path(sys.argv[2])).values():
    attempt(read, 300_000_000)
print(Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])
"""


@pytest.mark.deep
def test_a_hostile_run_takes_no_more_memory_than_its_size(run, tmp_path):
    """A text of 300 MB, a file of nothing but markers, and a sparse one of a terabyte."""
    messages = json.dumps([{"role": "user", "content": "a" * 300_000_000}])
    add_row(run, "calls", call_id="z", messages=messages)
    events = run_files(run, "events")[0].read_bytes()
    (run / "events-0-0.arrow").write_bytes(events + b"\xff\xff\xff\xff\x08\0\0\0" * 2**20)
    command = [sys.executable, "-c", READS_ALL, run, tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) * 1024 < 2**30 + 300_000_000
