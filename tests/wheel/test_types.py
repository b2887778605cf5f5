import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy", reason="a type checker is installed beside one of the wheels")

TYPED = Path(__file__).parent / "typed"
CONFIGURATION = """
[mypy]
strict = true
# libraries whose types do not appear in the files: reading them takes half a minute
[mypy-accelerate.*,click.*,datasets.*,httpx.*,huggingface_hub.*,numpy.*,peft.*,pyarrow.*,rich.*,torch.*,transformers.*,trl.*]
follow_imports = skip
"""


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """Where mypy finds which errors: (file, line, code)."""
    folder = tmp_path_factory.mktemp("mypy")
    (folder / "mypy.ini").write_text(CONFIGURATION)
    command = [sys.executable, "-I", "-m", "mypy", "--config-file", "mypy.ini"]
    command += [TYPED / "uses.py", TYPED / "misuses.py"]
    output = subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout
    assert "checked 2 source files" in output
    found = re.findall(r"^(.+?):(\d+): error: .*\[([a-z-]+)\]$", output, re.MULTILINE)
    return [(Path(path).name, int(line), code) for path, line, code in found]


def test_a_user_s_type_checker_knows_the_types_of_the_public_page(errors):
    assert [error for error in errors if error[0] == "uses.py"] == []


def test_it_reports_every_wrong_use(errors):
    expected = []
    for number, line in enumerate((TYPED / "misuses.py").read_text().splitlines(), start=1):
        for code in re.findall(r"# error: (\S+)", line):
            expected.append(("misuses.py", number, code))
    assert [error for error in errors if error[0] == "misuses.py"] == expected
