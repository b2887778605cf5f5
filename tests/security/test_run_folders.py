"""A run folder of somebody else costs a message: no wait, no memory beyond its size, no
traceback."""

import json
import os
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
from tests.deep import cases
from tests.security.run_folders import ENGINE, ROWS, add_row, attempt, commands, sound_run, verify

DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
VALUES = [
    ("calls", {"messages": f"[{DEEP}]"}),
    ("calls", {"messages": "null"}),
    ("calls", {"messages": "[1]"}),
    ("calls", {"messages": '[{"content": "no role"}]'}),
    ("calls", {"messages": '[{"role": "user", "tool_calls": [{}]}]'}),
    ("calls", {"messages": '[{"role": "user", "content": "\\ud800"}]'}),
    ("calls", {"messages": "no JSON"}),
    ("calls", {"messages": None}),
    ("calls", {"reply": DEEP}),
    ("calls", {"reply": "null"}),
    ("calls", {"reply": '["text"]'}),
    ("calls", {"reply": '{"content": 5}'}),
    (
        "calls",
        {
            "reply": (
                '{"tool_calls": [{"function": {"name": "bash", "arguments": {"command": "ls"}}}]}'
            )
        },
    ),
    ("calls", {"reply": '{"content": "a\\udfff"}'}),
    ("calls", {"tools": "[1]"}),
    ("calls", {"tools": '[{"function": null}]'}),
    ("calls", {"sampling": "[]"}),
    ("calls", {"sampling": '{"temperature": 1e999}'}),
    ("calls", {"prompt_length": 2**31 - 1}),
    ("calls", {"prompt_length": 2**31 - 1, "parent_id": "a", "call_id": "z"}),
    ("calls", {"prompt_length": -1}),
    ("calls", {"prompt_tail_ids": None}),
    ("calls", {"prompt_tail_ids": [None]}),
    ("calls", {"completion_ids": None}),
    ("calls", {"call_id": None}),
    ("calls", {"call_id": "a\0b"}),
    ("calls", {"session_id": "x" * 2_000}),
    ("calls", {"started_at": None}),
    ("calls", {"status": "model_config"}),
    ("calls", {"role": None}),
    ("calls", {"weight_versions": [{"version": None, "start": 0, "end": 1}]}),
    ("calls", {"weight_versions": [{"version": "1", "start": -(2**31), "end": 2**31 - 1}]}),
    ("sessions", {"session_id": "a\0b"}),
    ("sessions", {"session_id": "a\x1b[2Jb"}),
    ("sessions", {"reward": 1e308}),
    ("sessions", {"reward": float("nan")}),
    ("sessions", {"reward": float("-inf")}),
    ("sessions", {"parts": '{"a": 1e308}'}),
    ("sessions", {"parts": '{"a": true}'}),
    ("sessions", {"parts": '{"a": "1"}'}),
    ("sessions", {"parts": None}),
    ("sessions", {"parts": "{"}),
    ("sessions", {"evidence": "[]"}),
    ("sessions", {"evidence": DEEP}),
    ("sessions", {"suspicions": '{"rule": -1}'}),
    ("sessions", {"suspicions": '{"rule": 0.5}'}),
    ("sessions", {"revision": 2**31 - 1}),
    ("sessions", {"revision": -1}),
    ("sessions", {"status": "copy"}),
    ("sessions", {"started_at": None}),
    ("sessions", {"group_id": None}),
    ("events", {"kind": "stored", "detail": "[]"}),
    ("events", {"kind": "session_started", "detail": "no JSON"}),
    ("events", {"kind": "nothing"}),
    ("events", {"at": None}),
    ("routing", {"expert_bytes": 7}),
    ("routing", {"layers": 2**31 - 1}),
    ("routing", {"experts": None}),
    ("scores", {"top_k": 5}),
    ("scores", {"logprobs": None}),
    ("trained", {"step": None}),
    ("trained", {"spans": [{"call_id": "a", "start": -5, "end": None}]}),
]
"""(table, values) of a row with its own digest that no writer writes."""


@pytest.fixture
def run(tmp_path):
    return sound_run(tmp_path / "run")


def test_a_sound_run_is_read_by_everything(run, tmp_path):
    said = {name: attempt(read) for name, read in commands(run, tmp_path / "out").items()}
    assert {name: text for name, text in said.items() if text} == {"rerun": said["rerun"]}
    assert "does not say what the engine" in said["rerun"]
    assert verify(run).verdict == "ok"


@pytest.mark.parametrize(
    ("table", "values"), VALUES, ids=[f"{table} {[*values]}" for table, values in VALUES]
)
def test_a_value_that_no_writer_writes_is_damage_that_is_named(run, table, values):
    for path in run_files(run, table):
        path.unlink()
    add_row(run, table, **values)
    [path] = run_files(run, table)
    found = [finding for finding in verify(run).findings if finding.grade == "damage"]
    assert found
    ours = [each for each in found if each.where.startswith(path.name)]
    by_call = [
        each
        for each in found
        if each.what.startswith(("the prompt has", "parent a is", "its rows of the"))
    ]
    assert ours or by_call
    if ours and values.keys() <= {"role", "status", "parts", "reward"}:
        assert f"its {next(iter(values))} " in ours[0].what


@pytest.mark.parametrize("case", cases(range(len(VALUES)), 0, 12, 35))
def test_a_run_with_a_value_that_no_writer_writes_is_read_without_a_traceback(run, tmp_path, case):
    table, values = VALUES[case]
    for path in run_files(run, table):
        path.unlink()
    add_row(run, table, **values)
    for read in commands(run, tmp_path / "out").values():
        attempt(read)


def test_nothing_is_trained_on_a_row_that_no_writer_writes(run):
    for path in (*run_files(run, "calls"), *run_files(run, "sessions")):
        path.unlink()
    add_row(run, "calls", messages="[1]")
    add_row(run, "sessions", reward=1e308)
    totals = Totals()
    for traced in iter_traces(run, TraceOptions()):
        totals.add(traced)
    assert (totals.ledger.trained, totals.rewarded) == (0, 0)
    assert totals.ledger.left_out == {"violation": 1}
    assert load_sessions(run)["s"].error == "its row was changed after it was written"


FILES = [
    "run.json",
    "metrics.jsonl",
    "calls-1-1.arrow",
    "sessions-1-1.arrow",
    "trained-1-1.arrow",
    "logs/s.log",
]


def fifo(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


def folder(path):
    path.mkdir()


def elsewhere(path):
    other = sound_run(path.with_name("other"))
    path.symlink_to(run_files(other, "calls")[0])


def nowhere(path):
    path.symlink_to("/nowhere")


def endless(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "make", cases([fifo, device, endless, folder, nowhere, elsewhere], 0, 1, 2)
)
def test_what_is_no_file_of_the_run_is_not_read(run, tmp_path, name, make):
    (run / name).unlink(missing_ok=True)
    (tmp_path / "out").mkdir()
    make(run / name)
    ways = commands(run, tmp_path / "out")
    said = [attempt(ways[way]) for way in cases(ways, 0, 2, 10)]
    if name == "run.json":
        assert said[0]
    elif name.endswith(".arrow"):
        assert not verify(run).sound


def test_a_folder_of_a_run_is_not_a_link(run, tmp_path):
    shutil.move(run / "logs", tmp_path / "others")
    (run / "logs").symlink_to(tmp_path / "others")
    with pytest.raises(OSError, match="Not a directory"):
        open_file(run, "logs/s.log")


@pytest.mark.parametrize(
    "text",
    [DEEP, "[]", '{"schema_version": 5, "engines": []}', '{"schema_version": 5, "model": 1}', "\0"],
)
def test_metadata_of_another_form_is_a_message(run, text):
    (run / "run.json").write_text(text)
    with pytest.raises(RunError, match=r"run\.json"):
        read_metadata(run)


def test_the_metadata_of_a_record_set_the_limits_of_its_rerun_and_no_other_option(run, tmp_path):
    """`rolltap_allow` would let the program out."""
    limits = {"max_calls": 9, "allow": "*", "out": "/nowhere"}
    recorders = [{"engines": [ENGINE], "limits": limits, "images": "hide"}]
    metadata = {
        **read_metadata(run),
        "engines": {ENGINE: {"max_model_len": 99}},
        "recorders": recorders,
    }
    (run / "run.json").write_text(json.dumps(metadata))
    recorder = Record.of(run, "s").rerun(tmp_path / "again", None, {})
    assert "rolltap_allow" not in recorder._options
    assert recorder._options["rolltap_max_calls"] == ["9"]
    assert recorder.path == tmp_path / "again"


def rewritten(path, columns, compression=None):
    """Write a file of one commit, whose rows have these columns."""
    schema = TABLES[path.name.partition("-")[0]]
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with (
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_stream(file, schema, options=options) as writer,
    ):
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_a_compressed_commit_is_not_unpacked(run, compression):
    """Gigabytes of a column are kilobytes when they are compressed."""
    path = run_files(run, "calls")[0]
    row = ROWS["calls"] | {"prompt_tail_ids": [0] * 4_000_000, "prompt_length": 4_000_000}
    row[DIGEST] = row_digest(row, TABLES["calls"])
    batch = pa.RecordBatch.from_pylist([row], TABLES["calls"])
    rewritten(path, batch.columns, compression)
    assert path.stat().st_size < 200_000
    before = pa.total_allocated_bytes()
    [finding] = [finding for finding in verify(run).findings if finding.where.startswith(path.name)]
    assert "it is compressed, and no writer compresses" in finding.what
    assert pa.total_allocated_bytes() - before < 1_000_000


def test_the_limit_of_a_commit_is_raised_by_its_variable(run, monkeypatch):
    path = run_files(run, "calls")[0]
    monkeypatch.setenv("ROLLTAP_MOST_MIB", "0")
    with SegmentReader(path) as reader:
        assert [*reader] == []
    assert "set ROLLTAP_MOST_MIB to read it" in next(iter(reader.damage.values()))
    monkeypatch.setenv("ROLLTAP_MOST_MIB", "1")
    assert len(list(read_rows(run, "calls"))) == 3


def test_an_offset_outside_of_its_buffer_is_damage_in_every_column(run):
    for table in TABLES:
        path = run_files(run, table)[0]
        whole = path.read_bytes()
        with SegmentReader(path) as reader:
            [(offset, batch), *_] = reader
        for name in batch.schema.names:
            kind = batch.schema.field(name).type
            if not (pa.types.is_string(kind) or pa.types.is_list(kind) or pa.types.is_binary(kind)):
                continue
            source = pa.BufferReader(whole)
            source.seek(offset)
            column = pa.ipc.read_record_batch(pa.ipc.read_message(source), batch.schema).column(
                name
            )
            offsets = column.buffers()[1]
            last = offsets.address - pa.py_buffer(whole).address + 4 * batch.num_rows
            path.write_bytes(whole[:last] + (2**30).to_bytes(4, "little") + whole[last + 4 :])
            assert not verify(run).sound, (table, name)
        path.write_bytes(whole)


@pytest.mark.deep
def test_a_hostile_run_takes_no_more_memory_than_its_size(tmp_path):
    """A text of 300 MB, a file of nothing but markers, and a sparse one of a terabyte."""
    run = sound_run(tmp_path / "run")
    add_row(
        run,
        "calls",
        call_id="z",
        messages='[{"role": "user", "content": "' + "a" * 300_000_000 + '"}]',
    )
    (run / "events-0-0.arrow").write_bytes(
        run_files(run, "events")[0].read_bytes() + b"\xff\xff\xff\xff\x08\0\0\0" * 2**20
    )
    program = (
        "import sys; from pathlib import Path; from tests.security.run_folders import *\n"
        "for read in commands(Path(sys.argv[1]), Path(sys.argv[2])).values(): attempt(read,"
        " 300_000_000)\n"
        "print(Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, run, tmp_path / "out"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) * 1024 < 2**30 + 300_000_000
