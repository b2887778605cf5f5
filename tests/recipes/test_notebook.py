import ast
import json
import math
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell

import rolltap
from tests.conftest import ROOT

FOLDER = ROOT / "recipes" / "notebook"
NAMES = {
    "first_gradient": ("rolltap torch datasets", "EngineServer Task rollout TraceGRPOTrainer"),
    "train_offline": (
        "rolltap torch transformers tokenizers",
        "import_calls open_run train_offline",
    ),
}
"""Name of a notebook -> what it imports besides the standard library, and public names that it
shows."""

READ_BACK = """
print(json.dumps({
    "run": str(run.path),
    "sampled": batch.ledger.sampled,
    "trained": batch.ledger.trained,
    "left_out": batch.ledger.left_out,
    "masked": sum(sum(trace.completion_mask) for trace in batch.traces),
    "tokens_trained": logged["tokens_trained"],
    "no_signal": logged.get("left_out/no_signal", 0),
    "gradient_norm": logged["grad_norm"],
    "largest_change": max(float((after[name] - before[name]).abs().max()) for name in before),
}))
"""
"""A cell that the test appends, for the numbers that the notebook rounds when it prints them."""


@pytest.fixture(scope="module", params=sorted(NAMES))
def name(request):
    return request.param


@pytest.fixture(scope="module")
def notebook(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


@pytest.fixture(scope="module")
def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_it_is_valid_for_any_python_3_and_kept_with_the_outputs_of_one_run(notebook, code):
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert {output.get("name") for output in outputs} == {"stdout"}, "neither errors nor warnings"
    assert all(str(Path.home()) not in output.text for output in outputs)


def test_every_notebook_is_tested():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == NAMES.keys()


def test_ruff_finds_nothing_in_its_cells(name):
    for arguments in (["check", "--no-cache"], ["format", "--no-cache", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *arguments, FOLDER / f"{name}.ipynb"]
        ended = subprocess.run(ruff, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout + ended.stderr


def test_it_uses_the_public_page_and_few_other_packages(name, code):
    imported = set()
    names = set()
    for node in ast.walk(ast.parse("\n".join(cell.source for cell in code))):
        match node:
            case ast.Import(names=aliases):
                imported |= {alias.name.partition(".")[0] for alias in aliases}
            case ast.ImportFrom(module=module):
                imported.add(module.partition(".")[0])
            case ast.Attribute(value=ast.Name(id="rolltap"), attr=public):
                names.add(public)
    packages, shown = NAMES[name]
    assert imported - sys.stdlib_module_names == set(packages.split())
    assert set(shown.split()) <= names <= set(rolltap.__all__)


@pytest.fixture
def execute(tmp_path, monkeypatch):
    """Return a function that executes a notebook as it is written, where it is, and one more cell.

    It returns the JSON that this cell printed.
    """
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    # nothing of the user's own Jupyter: neither its kernels nor its settings
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))

    def execute(path, read_back):
        notebook = nbformat.read(path, as_version=4)
        notebook.cells.append(new_code_cell(read_back))
        NotebookClient(notebook, timeout=1800, resources={"metadata": {"path": FOLDER}}).execute()
        printed = ""
        for output in notebook.cells[-1].outputs:
            if output.get("name") == "stdout":
                printed += output.text
        return json.loads(printed)

    return execute


def test_offline_training_makes_the_rewarded_word_likelier(execute):
    values = "before, after, recorded.verify(progress=False).verdict, len(rewards), str(trained)"
    cell = f"print(json.dumps([{values}]))"
    before, after, verdict, sessions, trained = execute(FOLDER / "train_offline.ipynb", cell)
    assert (verdict, sessions) == ("ok", 64)
    assert after > 2 * before
    assert (Path(trained) / "config.json").is_file()


@pytest.mark.engine
@pytest.mark.harness
def test_it_goes_from_a_task_to_a_gradient(execute, monkeypatch):
    for program in ("vllm/bin/vllm", "mini-swe-agent/bin/mini"):
        if not (ROOT / ".venvs" / program).exists():
            pytest.skip(f".venvs/{program} is not installed: tests/run.sh installs it")
    monkeypatch.delenv("ROLLTAP_ENGINE_KEY_FILE", raising=False)
    executed = execute(FOLDER / "first_gradient.ipynb", READ_BACK)
    run = rolltap.open_run(executed["run"])
    sessions = run.sessions()
    calls = run.calls
    assert {session.status for session in sessions} == {"completed"}
    assert {session.reward for session in sessions} == {0.0, 1.0}
    # the model looks around, counts and submits, and skips the first turn in one session of a
    # hundred
    for session in sessions:
        submits = ["COMPLETE_TASK" in (call.reply or "") for call in calls[session.session_id]]
        assert submits.index(True) == len(submits) - 1
    assert max(map(len, calls.values())) >= 3
    assert run.verify(progress=False).findings == []  # every call that began is recorded

    sampled = sum(len(call.completion_ids) for recorded in calls.values() for call in recorded)
    assert executed["sampled"] == sampled > 0
    assert sampled == executed["trained"] + sum(executed["left_out"].values())
    with_signal = executed["tokens_trained"] + executed["no_signal"]
    assert executed["trained"] == executed["masked"] == with_signal
    assert executed["tokens_trained"] > 0

    assert math.isfinite(executed["gradient_norm"])
    assert executed["gradient_norm"] > 0
    assert executed["largest_change"] > 0
