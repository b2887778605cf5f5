"""Rows of SWE-bench, SWE-bench Verified, SWE-Gym, SWE-rebench and NeMo Gym as tasks.

Row keys: https://www.swebench.com/SWE-bench/guides/datasets/ (SWE-Gym has the same, without an
image; SWE-rebench adds `docker_image` and `install_config`; NeMo Gym has the row as JSON text under
`instance_dict`, and usually beside it).

Repositories whose tests are not pytest's have the commands of swebench's own harness, and its
parsers of the output: https://github.com/SWE-bench/SWE-bench (`TEST_DJANGO`, `TEST_SYMPY`).
"""

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field

from rolltap.addons.errors import InputError
from rolltap.trainer.tasks.git import commit_id
from rolltap.trainer.tasks.task import PytestJudge, Task

_PATCHED = re.compile(r"^diff --git a/.+ b/(.+\.py)$", re.MULTILINE)


class TestProgram(NamedTuple):
    """A repository's own test program."""

    log_parser: str
    """Name of the parser of its output: see `PytestJudge.log_parser`."""
    command: Callable[[str], Sequence[str]]
    """The program with its options, for one version of the repository."""
    label: Callable[[str], str]
    """Path of a test file -> the program's name of it."""
    file: str
    """File of the program, which the agent's changes do not replace."""


def _django(version: str) -> Sequence[str]:
    options = ["--verbosity", "2"]
    if version != "1.9":  # its program has no such options
        # one process, so that the output of tests does not mix
        options += ["--settings=test_sqlite", "--parallel", "1"]
    return ["env", "LC_ALL=C.UTF-8", "PYTHONIOENCODING=utf8", "./tests/runtests.py", *options]


def _django_label(file: str) -> str:
    return file.removesuffix(".py").removeprefix("tests/").replace("/", ".")


def _sympy(version: str) -> Sequence[str]:
    warnings = "PYTHONWARNINGS=ignore::UserWarning,ignore::SyntaxWarning"
    return ["env", warnings, "bin/test", "-C", "--verbose"]


TEST_PROGRAMS = {
    "django/django": TestProgram("parse_log_django", _django, _django_label, "tests/runtests.py"),
    "sympy/sympy": TestProgram("parse_log_sympy", _sympy, str, "bin/test"),
}
"""Repository, as OWNER/NAME -> its test program."""


INSTRUCTION = "Resolve the issue below in the repository that is the current folder.\n\n{problem}"
_WORKDIR = "/testbed"  # of all images of these datasets
_JUDGE_SECONDS = 1800.0  # the limit of swebench's own harness
_PYTEST = ["python", "-m", "pytest", "-p", "no:cacheprovider"]
# the images have the repository's Python in a conda environment of this name
_CONDA = "/opt/miniconda3/bin/activate"
_IN_IMAGE = f'if [ -f {_CONDA} ]; then . {_CONDA} testbed; fi; exec "$@"'


def _from_json(value: object) -> object:
    if isinstance(value, str):
        return json.loads(value)
    return value


_Names = Annotated[list[str], BeforeValidator(_from_json)]


class _InstallConfig(BaseModel):
    test_cmd: str | list[str] | None = None


class SweRow(BaseModel):
    """The keys of a row that a task is made of.

    Others are not read: `hints_text` would tell the answer.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    instance_id: str
    repo: str = Field(pattern=r"^[\w.-]+/[\w.-]+$")
    base_commit: str
    problem_statement: str = Field(min_length=1)
    test_patch: str
    patch: str | None = None
    version: str = ""
    fail_to_pass: _Names = Field(alias="FAIL_TO_PASS", min_length=1)
    pass_to_pass: _Names = Field(alias="PASS_TO_PASS")
    image: str | None = Field(
        default=None,
        validation_alias=AliasChoices("image", "docker_image", "image_name"),
    )
    test_cmd: str | list[str] | None = None
    install_config: Annotated[_InstallConfig | None, BeforeValidator(_from_json)] = None


def swe_task(row: Mapping[str, Any], where: str, repositories: Path | None) -> Task:
    """Return the task of a row.

    The judge runs the files of the named tests, with the test patch, by pytest.

    With `repositories` the workspace is the checkout there, and the image is optional. Without, it
    is the folder `/testbed` of the row's image, with all that was built in it. Where the tests are
    not pytest's, the judge runs the repository's own test program on the files of the test patch,
    always in the image, and `log_parser` reads its log.

    Raises pydantic's `ValidationError` for keys that are missing or wrong, `JSONDecodeError` for
    'instance_dict', and `InputError`, which names the row and the key, for tests that pytest does
    not know, a test command that does not run pytest, and a repository, commit or image that cannot
    be had.
    """
    swe = SweRow.model_validate(_flat(row))
    where = f"{where} ({swe.instance_id})"
    workspace = None
    if repositories is not None:
        workspace = _repository(swe, where, repositories)
    if workspace is None and swe.image is None:
        raise InputError(
            f"{where}: the row has no image (keys 'image', 'docker_image', 'image_name'), and no "
            f"folder of repositories was given: give one with {swe.repo.replace('/', '__')}"
        )
    foreign = _foreign(swe.fail_to_pass) or _foreign(swe.pass_to_pass)
    if foreign is None:
        tests = [*swe.fail_to_pass, *swe.pass_to_pass]
        files = sorted({name.partition("::")[0] for name in tests})
        command = [*_test_command(swe, where), *files]
        log_parser = None
    else:
        program, patched = _own_program(swe, where, foreign)
        files = [program.file]
        command = [*program.command(swe.version), *map(program.label, patched)]
        log_parser = program.log_parser
    if swe.image is not None:
        command = ["bash", "-c", _IN_IMAGE, "bash", *command]
    return Task(
        id=swe.instance_id,
        instruction=INSTRUCTION.format(problem=swe.problem_statement),
        workspace=workspace,
        commit=swe.base_commit,
        image=swe.image,
        image_optional=swe.image is not None and workspace is not None and log_parser is None,
        workdir=_WORKDIR,
        judge=PytestJudge(
            command=command,
            fail_to_pass=swe.fail_to_pass,
            pass_to_pass=swe.pass_to_pass,
            test_patch=swe.test_patch or None,
            files=files,
            log_parser=log_parser,
            timeout=_JUDGE_SECONDS,
        ),
        gold_patch=swe.patch or "",
        source=where,
    )


def _flat(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the row itself, also of a NeMo Gym row that has it as JSON text only."""
    if "FAIL_TO_PASS" in row:
        return row
    inner = (row.get("responses_create_params") or {}).get("metadata") or row
    text = inner.get("instance_dict")
    if not isinstance(text, str):
        return row
    return {**row, **json.loads(text)}


def _foreign(names: Sequence[str]) -> str | None:
    """Return the first name that is not one of pytest: `FILE.py::TEST`."""
    for name in names:
        file, separator, _ = name.partition("::")
        if not separator or not file.endswith(".py"):
            return name
    return None


def _own_program(swe: SweRow, where: str, foreign: str) -> tuple[TestProgram, list[str]]:
    """Return the test program of a repository without pytest, and the files that it runs."""
    key = "PASS_TO_PASS"
    if foreign in swe.fail_to_pass:
        key = "FAIL_TO_PASS"
    what = f"{where}: {key} names the test {foreign!r}, which is not a pytest name (FILE.py::TEST)"
    program = TEST_PROGRAMS.get(swe.repo)
    if program is None:
        raise InputError(
            f"{what}, and the test program of {swe.repo} is not known: write a task with a judge "
            "of kind 'command' that runs the project's own test program, or of kind 'pytest' with "
            "'log_parser'"
        )
    if swe.image is None:
        raise InputError(
            f"{what}: the test program of {swe.repo} runs in the row's image only, and the row "
            "has none (keys 'image', 'docker_image', 'image_name')"
        )
    patched = list(dict.fromkeys(_PATCHED.findall(swe.test_patch)))
    if not patched:
        lacks = f"no Python file that the test program of {swe.repo} could run"
        raise InputError(f"{what}, and 'test_patch' has {lacks}")
    return program, patched


def _test_command(swe: SweRow, where: str) -> list[str]:
    given = swe.test_cmd
    if not given and swe.install_config is not None:
        given = swe.install_config.test_cmd
    if not given:
        return _PYTEST
    commands = [given] if isinstance(given, str) else given
    words = shlex.split(commands[0], comments=True)
    is_pytest = "pytest" in words or "py.test" in words
    has_operators = set(commands[0]) & set(";&|<>`$")
    if len(commands) > 1 or not is_pytest or has_operators:
        raise InputError(
            f"{where}: 'test_cmd' is {given!r}, and only one pytest command without a shell's "
            "operators can be judged: remove the key, or write a task with a judge of kind "
            "'command'"
        )
    if "=" in words[0]:
        return ["env", *words]
    return words


def _repository(swe: SweRow, where: str, repositories: Path) -> Path | None:
    flat = swe.repo.replace("/", "__")
    for name in (flat, f"{flat}.git", swe.repo, f"{swe.repo}.git"):
        place = repositories / name
        if place.is_dir():
            if commit_id(place, swe.base_commit) is None:
                lacks = f"no commit {swe.base_commit} ('base_commit')"
                raise InputError(f"{where}: {place} has {lacks}: fetch it there")
            return place.resolve()
    if swe.image is None:
        lacks = f"no repository {flat} or {swe.repo} ('repo')"
        raise InputError(f"{where}: {repositories} has {lacks}: clone it there")
    return None
