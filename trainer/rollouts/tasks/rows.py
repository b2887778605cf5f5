"""Rows of a dataset on disk: JSON Lines, Parquet, or a folder that Hugging Face datasets wrote."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rolltap.addons.errors import InputError


def is_dataset(folder: Path) -> bool:
    """Return whether a folder holds a dataset: as `save_to_disk` writes it, or Parquet files as on the Hub."""
    marks = ("dataset_info.json", "dataset_dict.json")
    return any((folder / mark).is_file() for mark in marks) or bool(_parquet_files(folder))


def read_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any] | str]]:
    """Yield for each row its name, for messages, and its values; of a JSON Lines file the text of the line.

    Raises `InputError` for what cannot be read, and for a folder with several splits.
    """
    try:
        if path.is_dir():
            yield from ((f"{path}, row {number}", row) for number, row in enumerate(_rows_of_folder(path)))
        elif path.suffix == ".parquet":
            yield from ((f"{path}, row {number}", row) for number, row in enumerate(_rows_of_parquet([path])))
        else:
            lines = enumerate(path.read_text(encoding="utf-8").split("\n"), start=1)
            yield from ((f"{path}, line {number}", line) for number, line in lines if line.strip())
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the task file {path}: {error}") from error


def _rows_of_folder(folder: Path) -> Iterator[Mapping[str, Any]]:
    files = _parquet_files(folder)
    if files and not (folder / "dataset_info.json").is_file():
        splits = sorted({file.name.split("-")[0].removesuffix(".parquet") for file in files})
        if len(splits) > 1:
            raise InputError(
                f"{folder} has the splits {', '.join(splits)}: give one Parquet file, or a folder with one"
            )
        yield from _rows_of_parquet(files)
        return
    from datasets import DatasetDict, load_from_disk

    dataset = load_from_disk(str(folder))
    if isinstance(dataset, DatasetDict):
        if len(dataset) != 1:
            raise InputError(f"{folder} has the splits {', '.join(dataset)}: give the folder of one, {folder}/SPLIT")
        (dataset,) = dataset.values()
    yield from dataset


def _rows_of_parquet(files: list[Path]) -> Iterator[Mapping[str, Any]]:
    from pyarrow import parquet

    for file in files:
        for batch in parquet.ParquetFile(file).iter_batches():
            yield from batch.to_pylist()


def _parquet_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.parquet")) or sorted((folder / "data").glob("*.parquet"))
