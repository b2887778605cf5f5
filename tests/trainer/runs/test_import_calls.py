import io
import json
import math
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.errors import InputError
from rolltap.addons.store.metadata import read_metadata
from rolltap.trainer.runs.import_calls import ImportSummary, import_calls
from rolltap.trainer.runs.merge import merge_runs
from rolltap.trainer.traces.build import build_traces
from rolltap.trainer.traces.reader import RecordedCalls, RecordedSession, load_sessions
from rolltap.trainer.traces.sessions import TraceOptions, trace_session
from tests.conftest import ROOT
from tests.deep import examples
from tests.factories import make_call, make_session, write_run
from tests.trainer.cli.program import ROLLTAP, run_rolltap
from tests.trainer.runs.recorded_runs import ignore, import_line, recorded_sessions, traces_of


def line(**fields):
    """Return a valid line with some of its keys changed."""
    tokens = {"prompt_ids": [1, 2], "completion_ids": [3], "logprobs": [-0.5]}
    return {"session_id": "s", "call_id": "a", **tokens, "finish_reason": "stop", **fields}


def write(*lines):
    texts = [text if isinstance(text, str) else json.dumps(text) for text in lines]
    return "".join(f"{text}\n" for text in texts).encode()


def load(run, content, bad=None, *, skip_bad=False, model=None):
    """Import `content`, and return the summary. Bad lines are added to `bad`: number -> fault."""
    bad = {} if bad is None else bad
    how = {"skip_bad": skip_bad, "report": bad.__setitem__, "advance": ignore, "model": model}
    return import_calls(io.BytesIO(content), run, **how)


def refused(run, content):
    """Return the bad lines for which `content` is refused: number -> fault."""
    bad = {}
    with pytest.raises(InputError, match="nothing was imported"):
        load(run, content, bad)
    return bad


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


class TestCalls:
    def test_a_call_and_its_session_come_back_with_all_values_of_the_line(self, run):
        of_session = {"task_id": "t", "group_id": "g", "harness": "h", "reward": 0.5}
        of_call = {"role": "subagent", "status": "aborted", "finish_reason": "stop"}
        about = {"started_at": "2026-01-01T02:00:00+02:00", "policy_version": "7"}
        load(run, write(line(**of_session, **of_call, **about)))
        expected = make_call("a", [1, 2], [3], logprobs=[-0.5], version="7", **of_call)
        [call] = RecordedCalls(run)["s"]
        assert call == replace(expected, kind_reason="imported")
        session = make_session(status="failed", reward=0.5, policy_version="7")
        assert load_sessions(run)["s"] == session

    def test_missing_values_are_left_open_and_a_later_line_may_give_them(self, run):
        load(run, write(line(), line(session_id="t"), line(session_id="t", call_id="b", reward=1)))
        session, later = load_sessions(run).values()
        assert session.group_id == "s"
        assert session.reward is None
        assert session.harness == ""
        assert session.status == "completed"
        assert session.policy_version == "unknown"
        assert later.reward == 1.0
        assert read_metadata(run)["source"] == "import"
        assert "tokenizer_sha256" not in read_metadata(run)

    @pytest.mark.parametrize(
        ("second", "given", "parent"), [([1, 2], "b", "b"), ([9], "b", "a"), ([9], "unknown", "a")]
    )
    def test_a_given_parent_decides_between_prefixes_of_the_prompt_alone(
        self, run, second, given, parent
    ):
        child = line(call_id="c", prompt_ids=[1, 2, 3], parent_id=given)
        load(run, write(line(), line(call_id="b", prompt_ids=second), child))
        parents = {call.call_id: call.parent_id for call in RecordedCalls(run)["s"]}
        assert parents == {"a": None, "b": None, "c": parent}


class TestModel:
    def test_an_existing_run_is_refused_and_the_import_can_be_merged_with_it(self, run, tmp_path):
        write_run(run, make_call("x"), tokenizer_sha256="a", chat_template_sha256="b")
        advice = f"import into a new folder NEW, then `rolltap merge {run} NEW --out MERGED`"
        with pytest.raises(InputError, match=advice):
            load(run, write(line(session_id="t")))
        assert set(RecordedCalls(run)) == {"s"}
        new = tmp_path / "new"
        merged = tmp_path / "merged"
        load(new, write(line(session_id="t")))
        merge_runs([new, run], merged, ignore)
        assert set(RecordedCalls(merged)) == {"s", "t"}
        assert read_metadata(merged)["tokenizer_sha256"] == "a"
        origins = [{"run": "new", "source": "import"}, {"run": "run"}]
        assert read_metadata(merged)["merged_from"] == origins

    def test_with_a_model_it_merges_only_with_runs_of_the_models_tokenizer(
        self, run, tmp_path, tokenizer_folder
    ):
        load(run, write(line(session_id="t")), model=str(tokenizer_folder))
        noted = read_metadata(run)
        assert noted["source"] == "import"
        assert noted["model"] == str(tokenizer_folder)
        digests = {key: value for key, value in noted.items() if key.endswith("_sha256")}
        mine = write_run(tmp_path / "mine", make_call("x"), **digests)
        theirs = write_run(tmp_path / "theirs", make_call("x"), **dict.fromkeys(digests, "other"))
        merge_runs([run, mine], tmp_path / "merged", ignore)
        assert set(RecordedCalls(tmp_path / "merged")) == {"s", "t"}
        assert "source" not in read_metadata(tmp_path / "merged")
        with pytest.raises(InputError, match="do not have the same tokenizer: merge runs of one"):
            merge_runs([run, theirs], tmp_path / "no", ignore)

    def test_a_folder_without_a_tokenizer_makes_no_run(self, run):
        message = f"^the folder {ROOT} has none of .*: give the folder or name of a m"
        with pytest.raises(InputError, match=message):
            load(run, write(line()), model=str(ROOT))
        assert not run.exists()


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
def test_a_call_with_invalid_log_probabilities_is_kept_and_not_trained_on(run, fields, reason):
    bad = {}
    summary = load(run, write(line(**fields)), bad)
    assert bad == {}
    [call] = RecordedCalls(run)["s"]
    _, ledger = build_traces([call], "per_request")
    assert ledger.trained == 0
    assert ledger.left_out == ({reason: 1} if call.completion_ids else {})
    # log-probabilities that are not known violate nothing
    is_violated = fields != {"logprobs": None}
    assert bool(call.violation) == is_violated
    assert summary.violations == is_violated
    assert summary.without_logprobs == (reason == "missing_logprobs")


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
        faults = refused(run, content)
        assert list(faults) == [3]
        assert reason in faults[3]
        assert list(run.parent.iterdir()) == []
        skipped = {}
        summary = load(run, content, skipped, skip_bad=True)
        assert skipped == faults
        assert summary.calls == summary.skipped == 1
        assert list(RecordedCalls(run)) == ["t"]

    def test_all_bad_lines_are_named_with_few_of_their_faults(self, run):
        lines = write("{", line(), "[", "nope", line(prompt_ids=[-1] * 5000, nonsense=1))
        bad = refused(run, b"\xff\xfe\n" + lines)
        assert list(bad) == [1, 2, 4, 5, 6]
        assert len(bad[6]) < 200
        assert "unknown key 'nonsense'" in bad[6]

    def test_a_repeated_call_is_bad_and_the_first_one_counts(self, run):
        content = write(line(), line(completion_ids=[4]), line(session_id="t"))
        assert refused(run, content) == {2: "call_id 'a' of session 's' is in line 1 too"}
        load(run, content, skip_bad=True)
        assert RecordedCalls(run)["s"][0].completion_ids == [3]

    @pytest.mark.parametrize("field", ["task_id", "group_id", "harness", "reward"])
    def test_a_line_that_contradicts_a_good_one_of_its_session_is_bad(self, run, field):
        first, second = (0.0, 1.0) if field == "reward" else ("a", "b")
        other = line(call_id="c", **{field: second})
        content = write(line(**{field: first}), line(call_id="b"), other)
        fault = f"{field} is {second!r}, but line 1 of session 's' says {first!r}"
        assert refused(run, content) == {3: fault}
        # a bad line, which repeats the first one, contradicts none
        content = write(line(), line(**{field: first}), other)
        assert load(run, content, skip_bad=True).calls == 2

    @pytest.mark.parametrize("content", [b"{}", b"\n\n"])
    def test_a_file_without_a_good_line_makes_no_run(self, run, content):
        with pytest.raises(InputError, match="there is no line to import"):
            load(run, content, skip_bad=True)
        assert not run.exists()


class TestCommand:
    def test_the_standard_input_may_be_a_pipe(self, run):
        command = [ROLLTAP, "import", "-", run, "--json"]
        lines = write(line(call_id="b", prompt_ids=[1, 2, 3, 4]), line())
        ended = subprocess.run(command, input=lines, capture_output=True, check=True)
        counts = ImportSummary(sessions=1, calls=2, bridged=1, sampled_tokens=2)
        assert json.loads(ended.stdout) == asdict(counts)
        _, second = RecordedCalls(run)["s"]
        assert second.prompt_ids == [1, 2, 3, 4]
        assert second.parent_id == "a"
        assert second.kind == "bridged"
        assert second.kind_reason is None

    def test_bad_lines_are_printed_up_to_a_number_and_end_with_status_1_or_are_skipped_and_counted(
        self, run, tmp_path
    ):
        file = tmp_path / "calls.jsonl"
        file.write_bytes(write(*["{"] * 25, line(), line(call_id="b", logprobs=None)))
        ended = run_rolltap("import", file, run)
        assert ended.returncode == 1
        assert ended.stdout == ""
        assert "line 20: Invalid JSON" in ended.stderr
        assert "line 21:" not in ended.stderr
        assert "and 5 more bad lines" in ended.stderr
        assert not run.exists()
        ended = run_rolltap("import", file, run, "--skip-bad")
        assert ended.returncode == 0
        assert "25 bad lines were skipped" in ended.stdout
        assert "1 calls have no log-probabilities" in ended.stdout


KILLED_AT_EVERY_STEP = """
import os, signal, sys
from pathlib import Path
import pandas  # pyarrow would in each child
from rolltap.trainer.runs.import_calls import ImportSummary, import_calls

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


def test_an_import_that_is_killed_before_any_of_its_steps_adds_all_or_nothing(tmp_path):
    content = write(line(), line(session_id="t"))
    (tmp_path / "calls.jsonl").write_bytes(content)
    runs = [tmp_path / str(step) / "run" for step in range(30)]
    command = [sys.executable, "-c", KILLED_AT_EVERY_STEP, tmp_path / "calls.jsonl", *runs]
    ended = [int(status) for status in subprocess.check_output(command).split()]
    assert set(ended) == {0, signal.SIGKILL}
    were_complete = set()
    for run in runs[: ended.index(0) + 1]:
        were_complete.add(run.exists())
        if not run.exists():
            load(run, content)
        assert set(RecordedCalls(run)) == set(load_sessions(run)) == {"s", "t"}
        assert list(run.glob(".*")) == []
    assert were_complete == {False, True}


STRATEGIES = ("per_request", "prefix_merging", "tree")


class TestProperties:
    @given(recorded_sessions(), st.randoms(use_true_random=False))
    @examples(100)
    def test_exported_calls_are_imported_to_the_same_traces_and_ledger_in_any_order(
        self, sessions, rng
    ):
        lines = lines_of(sessions)
        rng.shuffle(lines)
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            assert load(run, write(*lines)).skipped == 0
            imported = {strategy: traces_of(run, strategy) for strategy in STRATEGIES}
        for session, calls in sessions:
            name = session.session_id
            recorded = RecordedSession(session_id=name, session=session, calls=calls)
            for strategy in STRATEGIES:
                expected = trace_session(recorded, TraceOptions(strategy))
                traces, ledger = imported[strategy][name]
                assert ledger == expected.ledger
                # an import finds out the kinds of continuity itself
                for found, trace in zip(traces, expected.traces, strict=True):
                    assert found == replace(trace, continuity=found.continuity)

    @given(recorded_sessions(), st.randoms(use_true_random=False))
    @examples(50)
    def test_the_order_of_lines_without_times_does_not_matter(self, sessions, rng):
        lines = [json.loads(text) for text in lines_of(sessions)]
        for each in lines:
            del each["started_at"]
        with tempfile.TemporaryDirectory() as folder:
            load(Path(folder) / "a", write(*lines))
            load(Path(folder) / "b", write(*rng.sample(lines, len(lines))))
            assert traces_of(Path(folder) / "a") == traces_of(Path(folder) / "b")


def lines_of(sessions):
    lines = []
    for session, calls in sessions:
        lines += [import_line(call, session) for call in calls]
    return lines
