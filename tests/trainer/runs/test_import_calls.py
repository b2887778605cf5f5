import io
import json
import math
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.errors import InputError
from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.tables import read_rows
from rolltap.trainer.runs.import_calls import import_calls
from rolltap.trainer.runs.merge import merge_runs
from rolltap.trainer.traces.build import build_traces
from rolltap.trainer.traces.reader import RecordedCalls, RecordedSession, load_sessions
from rolltap.trainer.traces.sessions import TraceOptions, trace_session
from tests.conftest import ROOT
from tests.deep import examples
from tests.factories import START, make_call, make_session, write_run
from tests.trainer.runs.recorded_runs import import_line, recorded_sessions, traces_of


def line(**fields):
    """Return a valid line with some of its keys changed."""
    tokens = {"prompt_ids": [1, 2], "completion_ids": [3], "logprobs": [-0.5]}
    return {"session_id": "s", "call_id": "a", **tokens, "finish_reason": "stop", **fields}


def write(*lines):
    return "".join(
        (text if isinstance(text, str) else json.dumps(text)) + "\n" for text in lines
    ).encode()


def load(run, content, bad=None, **options):
    """Import `content` and return the summary and the bad lines."""
    bad = [] if bad is None else bad
    options = {
        "skip_bad": False,
        "report": lambda *fault: bad.append(fault),
        "advance": lambda *_: None,
    } | options
    return import_calls(io.BytesIO(content), run, **options), bad


def refused(run, content):
    """Return the bad lines for which `content` is refused."""
    with pytest.raises(InputError, match="nothing was imported"):
        load(run, content, bad := [])
    return bad


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


class TestCalls:
    def test_a_call_and_its_session_come_back_with_all_values_of_the_line(self, run):
        of_session = {"task_id": "t", "group_id": "g", "harness": "h", "reward": 0.5}
        of_call = {"role": "subagent", "status": "aborted", "policy_version": "7"}
        load(run, write(line(started_at="2026-01-01T02:00:00+02:00", **of_session, **of_call)))
        [call] = RecordedCalls(run)["s"]
        assert (call.prompt_ids, call.completion_ids, call.logprobs) == ([1, 2], [3], [-0.5])
        assert (call.kind, call.kind_reason, call.parent_id) == ("root", "imported", None)
        assert (call.role, call.status, call.finish_reason, call.started_at) == (
            "subagent",
            "aborted",
            "stop",
            START,
        )
        assert [(span.version, span.start, span.end) for span in call.weight_versions] == [
            ("7", 0, 1)
        ]
        assert load_sessions(run)["s"] == make_session(
            status="failed", reward=0.5, policy_version="7"
        )

    def test_missing_values_are_left_open_and_a_later_line_may_give_them(self, run):
        load(run, write(line(), line(session_id="t"), line(session_id="t", call_id="b", reward=1)))
        session, later = load_sessions(run).values()
        assert (session.group_id, session.reward, session.harness, session.status) == (
            "s",
            None,
            "",
            "completed",
        )
        assert (session.policy_version, later.reward) == ("unknown", 1.0)
        assert read_metadata(run)["source"] == "import"
        assert "tokenizer_sha256" not in read_metadata(run)

    def test_prompts_are_stored_as_suffixes_of_the_parents_tokens(self, run):
        child = line(call_id="b", prompt_ids=[1, 2, 3, 4])
        summary, _ = load(run, write(child, line()))
        rows = {row["call_id"]: row for row in read_rows(run, "calls")}
        assert (rows["b"]["prompt_tail_ids"], rows["b"]["parent_id"], rows["b"]["kind"]) == (
            [4],
            "a",
            "bridged",
        )
        assert rows["b"]["kind_reason"] is None
        assert RecordedCalls(run)["s"][1].prompt_ids == [1, 2, 3, 4]
        assert (summary.calls, summary.bridged, summary.sessions, summary.sampled_tokens) == (
            2,
            1,
            1,
            2,
        )

    @pytest.mark.parametrize(
        ("second", "given", "parent"), [([1, 2], "b", "b"), ([9], "b", "a"), ([9], "unknown", "a")]
    )
    def test_a_given_parent_decides_between_prefixes_of_the_prompt_alone(
        self, run, second, given, parent
    ):
        other, child = (
            line(call_id="b", prompt_ids=second),
            line(call_id="c", prompt_ids=[1, 2, 3], parent_id=given),
        )
        load(run, write(line(), other, child))
        assert {call.call_id: call.parent_id for call in RecordedCalls(run)["s"]} == {
            "a": None,
            "b": None,
            "c": parent,
        }

    def test_an_existing_run_is_refused_and_the_import_can_be_merged_with_it(self, run, tmp_path):
        write_run(run, make_call("x"), tokenizer_sha256="a", chat_template_sha256="b")
        advice = f"import into a new folder NEW, then `rolltap merge {run} NEW --out MERGED`"
        with pytest.raises(InputError, match=advice):
            load(run, write(line(session_id="t")))
        assert set(RecordedCalls(run)) == {"s"}
        new, merged = tmp_path / "new", tmp_path / "merged"
        load(new, write(line(session_id="t")))
        merge_runs([new, run], merged, lambda *_: None)
        assert set(RecordedCalls(merged)) == {"s", "t"}
        assert read_metadata(merged)["tokenizer_sha256"] == "a"
        assert read_metadata(merged)["merged_from"] == [
            {"run": "new", "source": "import"},
            {"run": "run"},
        ]

    def test_with_a_model_it_merges_only_with_runs_of_the_models_tokenizer(
        self, tmp_path, tokenizer_folder
    ):
        for name, digest in (("mine", None), ("theirs", "other")):
            load(
                tmp_path / f"new {name}", write(line(session_id=name)), model=str(tokenizer_folder)
            )
            noted = read_metadata(tmp_path / f"new {name}")
            assert (noted["source"], noted["model"]) == ("import", str(tokenizer_folder))
            recorded = {
                key: digest or value for key, value in noted.items() if key.endswith("_sha256")
            }
            write_run(tmp_path / name, make_call("x"), **{"model": "recorded", **recorded})
        merge_runs([tmp_path / "new mine", tmp_path / "mine"], tmp_path / "merged", lambda *_: None)
        assert set(RecordedCalls(tmp_path / "merged")) == {"s", "mine"}
        assert "source" not in read_metadata(tmp_path / "merged")
        with pytest.raises(
            InputError, match="do not have the same tokenizer: merge runs of one model"
        ):
            merge_runs(
                [tmp_path / "new theirs", tmp_path / "theirs"], tmp_path / "no", lambda *_: None
            )

    @pytest.mark.parametrize(
        ("content", "options", "message"),
        [
            (
                write(line()),
                {"model": str(ROOT)},
                f"^the folder {ROOT} has none of .*: give the folder or name of a m",
            ),
            (
                b"{}",
                {"skip_bad": True},
                "there is no line to import: all 1 are bad; line 1: .*is missing",
            ),
            (b"\n\n", {}, "there is no line"),
        ],
    )
    def test_a_model_without_a_tokenizer_and_a_file_without_lines_make_no_run(
        self, run, content, options, message
    ):
        with pytest.raises(InputError, match=message):
            load(run, content, **options)
        assert not run.exists()


class TestUntrainable:
    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            ({"logprobs": None}, "missing_logprobs"),
            ({"logprobs": []}, "missing_logprobs"),
            ({"logprobs": [-0.5, -0.5]}, "violation"),
            ({"completion_ids": []}, "violation"),
            ({"logprobs": [0.25]}, "violation"),
            ({"logprobs": [math.nan]}, "violation"),
            ({"logprobs": [-math.inf]}, "violation"),
            ({"logprobs": [-1e300]}, "violation"),
            ({"logprobs": [-9999.0]}, "violation"),
        ],
        ids=str,
    )
    def test_a_call_with_invalid_log_probabilities_is_kept_and_not_trained_on(
        self, run, fields, reason
    ):
        summary, bad = load(run, write(line(**fields)))
        [call] = RecordedCalls(run)["s"]
        _, ledger = build_traces([call], "per_request")
        tokens = len(call.completion_ids)
        assert bad == []
        assert ledger.trained == 0
        assert ledger.left_out == ({reason: tokens} if tokens else {})
        assert (call.violation is None) == (fields.get("logprobs", 0) is None)
        assert summary.violations == int(call.violation is not None)
        assert summary.without_logprobs == int(reason == "missing_logprobs")


BAD = {
    "not JSON": ("{", "Invalid JSON"),
    "not an object": ([1], "the line is [1]: Input should be an object"),
    "an unknown key": (line(promt_ids=[1]), "unknown key 'promt_ids'"),
    "a missing key": ({"session_id": "s"}, "'call_id' is missing"),
    "a negative token id": (line(prompt_ids=[1, -1]), "'prompt_ids.1' is -1"),
    "a token id beyond 32 bits": (line(completion_ids=[2**31]), "'completion_ids.0' is 2147483648"),
    "a token id that is a fraction": (line(completion_ids=[1.5]), "'completion_ids.0' is 1.5"),
    "no prompt": (line(prompt_ids=[]), "'prompt_ids' is []"),
    "a name with control characters": (line(session_id="a\x1b"), "'session_id' is 'a\\x1b'"),
    "a reward of which no sum is finite": (line(reward=1e308), "'reward' is 1e+308"),
    "token ids as text": (line(prompt_ids="1 2"), "'prompt_ids' is '1 2'"),
    "an empty name": (line(session_id=""), "'session_id' is ''"),
    "a role that there is not": (line(role="boss"), "'role' is 'boss'"),
    "a reward that is not a number": (line(reward=math.nan), "'reward' is nan"),
    "a time that is none": (line(started_at="yesterday"), "'started_at' is 'yesterday'"),
    "a time out of range": (
        line(started_at="0001-01-01T00:00:00+10:00"),
        "the year is out of range",
    ),
    "half a character": ('{"session_id": "\\ud800"}', "Invalid JSON"),
}


class TestBadLines:
    @pytest.mark.parametrize(("bad", "reason"), BAD.values(), ids=BAD)
    def test_a_bad_line_is_named_nothing_is_imported_and_the_other_lines_on_demand(
        self, run, bad, reason
    ):
        content = write(line(session_id="t"), "", bad)
        [(number, fault)] = refused(run, content)
        assert (number, reason in fault) == (3, True)
        assert list(run.parent.iterdir()) == []
        summary, [skipped] = load(run, content, skip_bad=True)
        assert (summary.calls, summary.skipped, skipped) == (1, 1, (number, fault))
        assert list(RecordedCalls(run)) == ["t"]

    def test_all_bad_lines_are_named_with_few_of_their_faults(self, run):
        content = b"\xff\xfe\n" + write(
            "{", line(), "[", "nope", line(prompt_ids=[-1] * 5000, nonsense=1)
        )
        *others, (number, fault) = refused(run, content)
        assert [*(other for other, _ in others), number] == [1, 2, 4, 5, 6]
        assert len(fault) < 200
        assert "unknown key 'nonsense'" in fault

    def test_a_repeated_call_is_bad_and_the_first_one_counts(self, run):
        content = write(line(), line(completion_ids=[4]), line(session_id="t"))
        assert refused(run, content) == [(2, "call_id 'a' of session 's' is in line 1 too")]
        load(run, content, skip_bad=True)
        assert RecordedCalls(run)["s"][0].completion_ids == [3]

    @pytest.mark.parametrize(
        ("field", "first", "second"),
        [
            ("task_id", "a", "b"),
            ("group_id", "a", "b"),
            ("harness", "a", "b"),
            ("reward", 0.0, 1.0),
        ],
    )
    def test_a_line_that_contradicts_its_session_is_bad(self, run, field, first, second):
        lines = write(
            line(**{field: first}), line(call_id="b"), line(call_id="c", **{field: second})
        )
        assert refused(run, lines) == [
            (3, f"{field} is {second!r}, but line 1 of session 's' says {first!r}")
        ]

    def test_values_of_a_bad_line_do_not_constrain_other_lines(self, run):
        summary, _ = load(
            run, write(line(), line(reward=1.0), line(call_id="b", reward=0.0)), skip_bad=True
        )
        assert (summary.calls, summary.skipped) == (2, 1)


def rolltap(*arguments, **kwargs):
    program = Path(sys.executable).with_name("rolltap")
    return subprocess.run([program, *map(str, arguments)], capture_output=True, **kwargs)


class TestCommand:
    def test_the_standard_input_may_be_a_pipe(self, run):
        ended = rolltap("import", "-", run, "--json", input=write(line(), line(call_id="b")))
        assert ended.returncode == 0
        counts = {"sessions": 1, "calls": 2, "bridged": 0, "sampled_tokens": 2}
        assert json.loads(ended.stdout) == {
            **counts,
            "violations": 0,
            "without_logprobs": 0,
            "skipped": 0,
        }
        assert len(RecordedCalls(run)["s"]) == 2

    def test_bad_lines_are_printed_up_to_a_number_and_end_with_status_1_or_are_skipped_and_counted(
        self, run, tmp_path
    ):
        (tmp_path / "calls.jsonl").write_bytes(
            write(*["{"] * 25, line(), line(call_id="b", logprobs=None))
        )
        ended = rolltap("import", tmp_path / "calls.jsonl", run, text=True)
        assert (ended.returncode, ended.stdout) == (1, "")
        found = [
            text in ended.stderr
            for text in ("line 20: Invalid JSON", "and 5 more bad lines", "line 21:")
        ]
        assert found == [True, True, False]
        assert not run.exists()
        ended = rolltap("import", tmp_path / "calls.jsonl", run, "--skip-bad", text=True)
        assert ended.returncode == 0
        assert "25 bad lines were skipped" in ended.stdout
        assert "1 calls have no log-probabilities" in ended.stdout


KILLED_AT_EVERY_STEP = """
import os, signal, sys
from pathlib import Path
import pandas  # pyarrow would in each child
from rolltap.trainer.runs.import_calls import import_calls

def kill_before(step):
    def hook(event, arguments):
        nonlocal step
        creates = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
        if creates or event in ("os.rename", "os.mkdir", "os.rmdir", "os.remove"):
            if step == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            step -= 1
    sys.addaudithook(hook)

for step, run in enumerate(sys.argv[2:]):
    child = os.fork()
    if child == 0:
        source = open(sys.argv[1], "rb")
        kill_before(step)
        import_calls(source, Path(run), skip_bad=False, report=print, advance=lambda *_: None)
        os._exit(0)
    print(os.waitpid(child, 0)[1])
"""


class TestKilled:
    def test_an_import_that_is_killed_before_any_of_its_steps_adds_all_or_nothing(self, tmp_path):
        content = write(line(), line(session_id="t"))
        (tmp_path / "calls.jsonl").write_bytes(content)
        runs = [tmp_path / str(step) / "run" for step in range(30)]
        command = [sys.executable, "-c", KILLED_AT_EVERY_STEP, tmp_path / "calls.jsonl", *runs]
        ended = [int(status) for status in subprocess.check_output(command).split()]
        assert set(ended) == {0, signal.SIGKILL}
        complete = []
        for run in runs[: ended.index(0) + 1]:
            complete.append(run.exists())
            if not complete[-1]:
                load(run, content)
            assert set(RecordedCalls(run)) == set(load_sessions(run)) == {"s", "t"}
            assert not [path for path in run.iterdir() if path.name.startswith(".")]
        assert set(complete) == {False, True}


class TestProperties:
    @given(recorded_sessions(), st.randoms(use_true_random=False))
    @examples(100)
    def test_exported_calls_are_imported_to_the_same_traces_and_ledger_in_any_order(
        self, sessions, rng
    ):
        lines = [import_line(call, session) for session, calls in sessions for call in calls]
        rng.shuffle(lines)
        strategies = ("per_request", "prefix_merging", "tree")
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            assert load(run, write(*lines))[1] == []
            imported = {strategy: traces_of(run, strategy) for strategy in strategies}
        for session, calls in sessions:
            recorded = RecordedSession(session_id=session.session_id, session=session, calls=calls)
            for strategy in strategies:
                expected = trace_session(recorded, TraceOptions(strategy))
                traces, ledger = imported[strategy][session.session_id]
                assert ledger == expected.ledger
                # an import finds out the kinds of continuity itself
                both = zip(expected.traces, traces, strict=True)
                assert traces == [
                    replace(trace, continuity=other.continuity) for trace, other in both
                ]

    @given(recorded_sessions(), st.randoms(use_true_random=False))
    @examples(50)
    def test_the_order_of_lines_without_times_does_not_matter(self, sessions, rng):
        lines = [
            json.loads(import_line(call, session)) for session, calls in sessions for call in calls
        ]
        for said in lines:
            del said["started_at"]
        shuffled = rng.sample(lines, len(lines))
        with tempfile.TemporaryDirectory() as folder:
            runs = [Path(folder) / name for name in "ab"]
            for run, order in zip(runs, (lines, shuffled), strict=True):
                load(run, write(*order))
            assert traces_of(runs[0]) == traces_of(runs[1])
