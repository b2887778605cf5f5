"""Tasks from files and folders: JSON Lines of tasks, Harbor tasks, and SWE rows of a dataset on
disk."""

import json
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rolltap.addons.errors import InputError
from rolltap.trainer.names import counted
from rolltap.trainer.tasks.harbor import is_harbor, load_harbor
from rolltap.trainer.tasks.swe import swe_task
from rolltap.trainer.tasks.task import (
    CommandJudge,
    Judge,
    LLMJudge,
    PythonJudge,
    SeveralJudges,
    Task,
)
from rolltap.trainer.toml import describe

logger = logging.getLogger(__name__)

_REASONS = 3
_OWN = re.compile(r"'[^']*'|\S*[/\d]\S*")  # of one task: names, numbers and paths in a message


class RefusedError(InputError):
    """A task of somebody else's making that cannot be had: a row of a dataset, or a Harbor
    folder."""


def load_tasks(
    path: str | Path, *, repositories: str | Path | None = None, refused: list[str] | None = None
) -> list[Task]:
    """Return the tasks of a file or folder.

    Args:
        path: JSON Lines file of tasks (`Task` has the keys), Harbor task folder or folder of them,
            or rows of SWE-bench and its relatives: a JSON Lines or Parquet file, or a Hugging Face
            dataset on disk.
        repositories: Folder with the checkouts or bare mirrors of SWE rows: `<owner>__<name>` or
            `<owner>/<name>`, with or without `.git`. None: the rows' images have them.
        refused: List that gets one line for each task that is refused; the others are returned.
            None: a warning counts the SWE rows and Harbor tasks that are refused, and a line of
            ours with a mistake raises.

    Raises `InputError` for a source that cannot be read, for one without tasks or with refused ones
    only, and for what a single task asks for and cannot have: it names the line, row or folder, the
    key, and what to do.
    """
    path = Path(path)
    folder = None if repositories is None else Path(repositories)
    if folder is not None and not folder.is_dir():
        raise InputError(f"the folder of repositories {folder} is not a folder")
    tasks: dict[str, Task] = {}
    faults: list[InputError] = []
    for make in _readers(path, folder):
        try:
            task = make()
            if task.id in tasks:
                raise InputError(f"{task.source}: the id {task.id!r} is used twice")
            tasks[task.id] = task
        except InputError as error:
            if refused is None and not isinstance(error, RefusedError):
                raise
            faults.append(error)
    if refused is not None:
        refused += map(str, faults)
    if not tasks:
        if len(faults) == 1:
            raise faults[0]
        why = describe_refused(faults, len(faults)) if faults else "it is empty"
        raise InputError(f"{path} has no tasks: {why}")
    if faults and refused is None:
        told = describe_refused(faults, len(faults) + len(tasks))
        logger.warning("%s: %s; the others are used", path, told)
    return list(tasks.values())


def describe_refused(errors: Sequence[Exception], total: int) -> str:
    """Return how many of `total` tasks are refused, and the most frequent reasons: the count and
    first one of each."""
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for message in map(str, errors):
        alike[_OWN.sub("", message)].append(message)
    ordered = sorted(alike.values(), key=len, reverse=True)
    reasons = [f"{len(messages)} x {messages[0]}" for messages in ordered[:_REASONS]]
    if len(ordered) > _REASONS:
        reasons.append(f"{sum(map(len, ordered[_REASONS:]))} x other reasons")
    return f"{len(errors)} refused of {counted(total, 'task')}: {'; '.join(reasons)}"


def _readers(path: Path, repositories: Path | None) -> Iterator[Callable[[], Task]]:
    """Yield a function for each task of the source: it returns the task or raises `InputError`."""
    if path.is_dir() and not _is_dataset(path):
        folders = [path]
        if not is_harbor(path):
            folders = [folder for folder in sorted(path.iterdir()) if is_harbor(folder)]
        if not folders:
            raise InputError(
                f"{path} has no tasks: give a Harbor task folder (with task.toml), a folder of "
                "them, a Hugging Face dataset on disk, or a .jsonl or .parquet file"
            )
        for folder in folders:
            yield partial(_refusing, str(folder), load_harbor, folder)
        return
    for where, row in _read_rows(path):
        yield partial(_task_of_row, where, row, path, repositories)


def _is_dataset(folder: Path) -> bool:
    """Return whether a folder holds a dataset: as `save_to_disk` writes it, or Parquet files as on
    the Hub."""
    marks = ("dataset_info.json", "dataset_dict.json")
    return any((folder / mark).is_file() for mark in marks) or bool(_parquet_files(folder))


def _read_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any] | str]]:
    """Yield for each row its name, for messages, and its values; of a JSON Lines file the text of
    the line."""
    try:
        if path.is_dir():
            for number, row in enumerate(_rows_of_folder(path)):
                yield f"{path}, row {number}", row
        elif path.suffix == ".parquet":
            for number, row in enumerate(_rows_of_parquet([path])):
                yield f"{path}, row {number}", row
        else:
            lines = path.read_text(encoding="utf-8").split("\n")
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{path}, line {number}", line
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the task file {path}: {error}") from error


def _rows_of_folder(folder: Path) -> Iterator[Mapping[str, Any]]:
    files = _parquet_files(folder)
    if files and not (folder / "dataset_info.json").is_file():
        splits = sorted({file.name.split("-")[0].removesuffix(".parquet") for file in files})
        if len(splits) > 1:
            raise InputError(f"{folder} has the splits {', '.join(splits)}: give one Parquet file")
        yield from _rows_of_parquet(files)
        return
    from datasets import DatasetDict, load_from_disk

    dataset = load_from_disk(str(folder))
    if isinstance(dataset, DatasetDict):
        if len(dataset) != 1:
            names = ", ".join(dataset)
            advice = f"give the folder of one, {folder}/SPLIT"
            raise InputError(f"{folder} has the splits {names}: {advice}")
        (dataset,) = dataset.values()
    yield from dataset


def _rows_of_parquet(files: list[Path]) -> Iterator[Mapping[str, Any]]:
    from pyarrow import parquet

    for file in files:
        for batch in parquet.ParquetFile(file).iter_batches():
            yield from batch.to_pylist()


def _parquet_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.parquet")) or sorted((folder / "data").glob("*.parquet"))


def _task_of_row(
    where: str,
    row: Mapping[str, Any] | str,
    path: Path,
    repositories: Path | None,
) -> Task:
    if isinstance(row, str):
        try:
            fields = json.loads(row)
        except ValueError as error:
            raise InputError(_one_value(path) or f"{where}: Invalid JSON: {error}") from error
        if not isinstance(fields, dict):
            raise InputError(f"{where} is not a JSON object")
        row = fields
    if "instance_id" in row or "problem_statement" in row:
        return _refusing(where, swe_task, row, where, repositories)
    return _resolve(Task(**{"source": where, **row}), path.parent, where)


def _one_value(path: Path) -> str:
    """Return what to do with a file that is a single JSON value over several lines; else an empty
    text."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return ""
    wanted = "."
    if isinstance(value, list):
        wanted = ".[]"
    lines = "one JSON value over several lines, and a task is one line"
    return f"{path} is {lines}: jq -c '{wanted}' {path} writes that"


def _refusing(where: str, make: Callable[..., Task], *source: object) -> Task:
    """Return the task that `make` makes of somebody else's source.

    Raises `RefusedError` for its errors.
    """
    try:
        return make(*source)
    except ValidationError as error:
        raise RefusedError(f"{where}: {describe(error)}") from error
    except json.JSONDecodeError as error:
        raise RefusedError(f"{where}: 'instance_dict' is not JSON: {error}") from error
    except InputError as error:
        raise RefusedError(str(error)) from error


def _resolve(task: Task, folder: Path, where: str) -> Task:
    """Return the task with its paths relative to `folder` as absolute ones."""

    def absolute(path: Path, key: str) -> Path:
        place = (folder / path).resolve()
        if not place.exists():
            raise InputError(f"{where}: {key} {place} does not exist")
        return place

    def all_absolute(paths: Mapping[str, Path], key: str) -> dict[str, Path]:
        return {place: absolute(source, key) for place, source in paths.items()}

    def judge_of(judge: Judge) -> Judge:
        if isinstance(judge, SeveralJudges):
            judges = []
            for one in judge.judges:
                judges.append(one.model_copy(update={"judge": judge_of(one.judge)}))
            return judge.model_copy(update={"judges": judges})
        if isinstance(judge, LLMJudge):
            return judge
        update: dict[str, Any] = {"tests": judge.tests and absolute(judge.tests, "'judge.tests'")}
        if isinstance(judge, CommandJudge):
            update["mounts"] = all_absolute(judge.mounts, "'judge.mounts'")
        if isinstance(judge, PythonJudge):
            update["folder"] = absolute(judge.folder or Path(), "'judge.folder'")
        return judge.model_copy(update=update)

    workspace = task.workspace and (folder / task.workspace).resolve()
    if workspace is not None and not workspace.is_dir():
        raise InputError(f"{where}: the workspace {workspace} is not a folder")
    image = task.image
    if image is not None and image.startswith(("./", "../")):
        image = str(absolute(Path(image), "'image'"))
    build = task.build
    if build is not None:
        source = absolute(build.folder, "'build.folder'")
        build = build.model_copy(update={"folder": source})
    update = {
        "workspace": workspace,
        "files": all_absolute(task.files, "'files'"),
        "image": image,
        "build": build,
        "solution": task.solution and absolute(task.solution, "'solution'"),
        "judge": task.judge and judge_of(task.judge),
    }
    return task.model_copy(update=update)
