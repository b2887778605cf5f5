"""Dataset cards of exported runs: the README.md that the Hub shows, with the metadata that it
reads.

`dataset_card.md` is the template.
"""

import hashlib
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType

from huggingface_hub import DatasetCard, DatasetCardData

from rolltap.addons.store.metadata import read_metadata
from rolltap.trainer.names import public_model
from rolltap.trainer.traces.sessions import Totals, TraceOptions

Written = Mapping[str, tuple[int, str]]
"""Config -> number of its rows, and their digest, with which the names of its files end."""
HERE = "path/to/this/folder"
"""Placeholder in a card for the folder's path, which is not known when the card is written."""


def file_digest(file: str | Path) -> str:
    """Return a digest of a file's content, for the names of the data files that a card lists.

    `load_dataset` takes two folders for one dataset when they have the same base name and the same
    card, and gives the rows that it loaded first.
    """
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()[:16]


def dataset_card(
    run: Path,
    options: TraceOptions,
    totals: Totals,
    *,
    written: Written = MappingProxyType({}),
    where: str = HERE,
) -> DatasetCard:
    """Return the card of traces that `load_from_disk(where)` opens.

    With `written` it is that of Parquet which `load_dataset(where, config)` opens. The shards of a
    config with rows are in the folder of its name.
    """
    configs = []
    for name, (rows, digest) in written.items():
        if rows:
            files = f"{name}/*-{digest}.parquet"
            configs.append({"config_name": name, "data_files": files})
    tags = ["rolltap", "agent", "rollouts", "reinforcement-learning", "trl"]
    data = DatasetCardData(pretty_name=run.resolve().name, tags=tags)
    if configs:
        data["configs"] = configs
    card: DatasetCard = DatasetCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("dataset_card.md")),
        version=version("rolltap"),
        facts=_facts(run, options, totals),
        rows={name: rows for name, (rows, _) in written.items()},
        where=where,
    )
    return card


def _facts(run: Path, options: TraceOptions, totals: Totals) -> dict[str, str]:
    metadata = read_metadata(run)
    rewards = f"{totals.rewarded:,} of {totals.sessions:,} sessions"
    if totals.rewarded:
        rewards += f", mean {totals.reward_sum / totals.rewarded:.3f}"
    traces = f"{totals.traces:,} by `{options.strategy}` of {', '.join(options.roles)} calls"
    if options.max_tokens:
        traces += f", at most {options.max_tokens:,} tokens long"
    facts = {
        "sessions": f"{totals.sessions:,}",
        "tasks": f"{len(totals.tasks):,}",
        "outcomes": _counts(totals.statuses),
        "with suspicions of cheating": f"{totals.suspicious:,} sessions",
        "ran in": _counts(totals.runtimes),
        "agent programs": _counts(totals.harnesses),
        "rewards": rewards,
        "model calls": f"{totals.calls:,}",
        "traces": traces,
        "sampled tokens": str(totals.ledger),
        "model": public_model(str(metadata.get("model", ""))),
        "tokenizer, SHA-256": _code(metadata.get("tokenizer_sha256")),
        "chat template, SHA-256": _code(metadata.get("chat_template_sha256")),
    }
    if not totals.tasks:
        del facts["tasks"]
    if not totals.suspicious:
        del facts["with suspicions of cheating"]
    # text of a task file or a preset, escaped for a cell of a Markdown table
    cells = {name: " ".join(fact.replace("|", "\\|").split()) for name, fact in facts.items()}
    return {name: cell for name, cell in cells.items() if cell}


def _code(text: str | None) -> str:
    return f"`{text}`" if text else ""


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({n:,})" for name, n in sorted(counts.items()))
