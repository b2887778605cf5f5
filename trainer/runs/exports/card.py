"""Dataset cards of exported runs: a README.md with the metadata that the Hub reads.

Columns and rows of exported datasets.
"""

from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Features, List, Value
from huggingface_hub import DatasetCardData

from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.schemas import CALL_SCHEMA, EVENT_SCHEMA, SESSION_SCHEMA
from rolltap.trainer.names import public_model
from rolltap.trainer.traces.build import Trace
from rolltap.trainer.traces.sessions import Totals, TraceOptions

_INTERNAL = ("digest", "engine")
"""Columns that have no meaning outside of the run: the row's digest, the engine's address in the recorder's network."""

TRACE_FEATURES = Features(
    {
        "session_id": Value("string"),
        "trace_id": Value("string"),
        "group_id": Value("string"),
        "task_id": Value("string"),
        "harness": Value("string"),
        "role": Value("string"),
        "reward": Value("float64"),
        "call_ids": List(Value("string")),
        "prompt_ids": List(Value("int32")),
        "completion_ids": List(Value("int32")),
        "completion_mask": List(Value("int8")),
        "logprobs": List(Value("float32")),
        "weight_versions": List({"version": Value("string"), "start": Value("int32"), "end": Value("int32")}),
        "continuity": List({"kind": Value("string"), "start": Value("int32"), "end": Value("int32")}),
        "shared_trace_id": Value("string"),
        "shared_tokens": Value("int32"),
    }
)

TRACE_COLUMNS = {
    "session_id": "one run of one agent program on one task",
    "trace_id": "unique in the data set",
    "group_id": "sessions of the same task under the same policy, which GRPO compares",
    "task_id, harness": "the task and the agent program",
    "role": "the last call's purpose: `agent`, `subagent`, `compaction` or `auxiliary`",
    "reward": "the session's reward; null when it has none",
    "call_ids": "the model calls of the trace, in order",
    "prompt_ids": "the first call's prompt, P token ids",
    "completion_ids": "all tokens after it, sampled or not, C token ids",
    "completion_mask": "C values, 1 where the policy sampled the token and this trace trains it",
    "logprobs": "C natural-log probabilities under the sampling policy, 0 where the mask is 0",
    "weight_versions": "the version of the weights that sampled `completion_ids[start:end]`",
    "continuity": "how the prompt of the call that sampled `completion_ids[start:end]` was made: `root`, `rendered` or "
    "`bridged` (the recorded tokens continued)",
    "shared_trace_id, shared_tokens": "strategy `tree`: the earlier trace with the longest shared prefix, its length",
}
"""Descriptions of the columns of `TRACE_FEATURES`, for the card. A key may name several columns."""


def _features(schema: pa.Schema) -> Features:
    return Features.from_arrow_schema(pa.schema([column for column in schema if column.name not in _INTERNAL]))


CALL_FEATURES = _features(CALL_SCHEMA)
SESSION_FEATURES = _features(SESSION_SCHEMA)
EVENT_FEATURES = _features(EVENT_SCHEMA)


def trace_row(trace: Trace) -> dict[str, Any]:
    """Return a trace as a row of `TRACE_FEATURES`."""
    row = {name: getattr(trace, name) for name in TRACE_FEATURES}
    for name in ("weight_versions", "continuity"):
        row[name] = [asdict(span) for span in row[name]]
    return row


HERE = "path/to/this/folder"
"""Placeholder in a card for the folder's path, which is not known when the card is written."""

_TAGS = ["rolltap", "agent", "rollouts", "reinforcement-learning", "trl"]

_INTRODUCTION = """\
Rollouts of agent programs as token ids: prompts, sampled tokens with their log-probabilities, and the version of the
weights that sampled them. Recorded and exported by rolltap {version}, which records the model calls of unmodified agent
programs."""

_TRACES = """\
## Traces

A trace is one sequence to train on. Each sampled token is trained by exactly one trace, or left out for a reason that
is counted above. Traces of sessions without a reward are here too, with the reward null; the count above has their
tokens by the reason, for instance `infrastructure`, `unjudged` or `no_reward`. Tokens that the policy did not sample
(tool results, later instructions) have mask 0.

{columns}
"""

_LOAD_TRACES = """\
## How to load

```python
from datasets import load_from_disk

traces = load_from_disk("{where}")
```

For TRL's `SFTTrainer`, which takes one sequence and a mask over the whole sequence:

```python
sft = traces.map(
    lambda trace: {{
        "input_ids": trace["prompt_ids"] + trace["completion_ids"],
        "assistant_masks": [0] * len(trace["prompt_ids"]) + trace["completion_mask"],
    }},
    remove_columns=traces.column_names,
)
```
"""

_LOAD_PARQUET = """\
## How to load

```python
from datasets import load_dataset

traces = load_dataset("{where}", "traces", split="train")
calls = load_dataset("{where}", "calls", split="train")
```

| config | rows | a row is |
| --- | --- | --- |
| `traces` | {traces:,} | one sequence to train on |
| `calls` | {calls:,} | one model call: tokens, messages, reply, sampling parameters, timings |
| `sessions` | {sessions:,} | one run of an agent program: task, group, outcome, reward, evidence, versions |
| `events` | {events:,} | one other event on the wire: a refused host, a retry, the start of a call |
"""

_CALLS = """\
## Calls

The calls of a session are consecutive rows, parents before children. A row holds only what its parent lacks:
`prompt_tail_ids` are the last tokens of a prompt of `prompt_length` tokens, and `messages` are those after the parent's
conversation and reply. So the size of a session grows linearly with its calls. To rebuild the full prompts:

```python
def full_prompts(calls):
    session_id, sequences = None, {}
    for call in calls:
        if call["session_id"] != session_id:
            session_id, sequences = call["session_id"], {}
        shared = call["prompt_length"] - len(call["prompt_tail_ids"])
        prompt_ids = sequences.get(call["parent_id"], [])[:shared] + call["prompt_tail_ids"]
        sequences[call["call_id"]] = prompt_ids + call["completion_ids"]
        yield call | {"prompt_ids": prompt_ids}
```

`messages`, `tools`, `reply` and `sampling` are JSON, and so are `parts`, `evidence` and `suspicions` of a session.
Messages hold what the agent program sent to the model, which may include names and files of its machine: read them
before you make this dataset public.
"""


def traces_card(run: Path, options: TraceOptions, totals: Totals) -> str:
    """Return the card of a folder that `load_from_disk` opens."""
    return "\n".join(
        [
            _header(run.resolve().name),
            _introduction(run, options, totals),
            _LOAD_TRACES.format(where=HERE),
            _TRACES.format(columns=_column_table()),
        ]
    )


def parquet_card(run: Path, options: TraceOptions, totals: Totals, rows: Mapping[str, int], where: str) -> str:
    """Return the card of a folder or a repository that `load_dataset(where, config)` opens.

    `rows` maps a config to its number of rows. The shards of a config with rows are in the folder of its name.
    """
    configs = [{"config_name": config, "data_files": f"{config}/*.parquet"} for config, n in rows.items() if n]
    return "\n".join(
        [
            _header(run.resolve().name, configs=configs),
            _introduction(run, options, totals),
            _LOAD_PARQUET.format(where=where, **rows),
            _TRACES.format(columns=_column_table()),
            _CALLS,
        ]
    )


def _header(name: str, **metadata: Any) -> str:
    data = DatasetCardData(pretty_name=name, tags=_TAGS, **metadata)
    return f"---\n{data.to_yaml()}\n---\n\n# {name}\n"


def _introduction(run: Path, options: TraceOptions, totals: Totals) -> str:
    return "\n".join([_INTRODUCTION.format(version=version("rolltap")), "", *_facts(run, options, totals), ""])


def _facts(run: Path, options: TraceOptions, totals: Totals) -> list[str]:
    metadata = read_metadata(run)
    rewards = f"{totals.rewarded:,} of {totals.sessions:,} sessions"
    if totals.rewarded:
        rewards += f", mean {totals.reward_sum / totals.rewarded:.3f}"
    cut = f", at most {options.max_tokens:,} tokens long" if options.max_tokens else ""
    facts = {
        "sessions": f"{totals.sessions:,}",
        "tasks": f"{len(totals.tasks):,}" if totals.tasks else "",
        "outcomes": ", ".join(f"{name} ({n:,})" for name, n in sorted(totals.statuses.items())),
        "with suspicions of cheating": f"{totals.suspicious:,} sessions" if totals.suspicious else "",
        "ran in": ", ".join(f"{name} ({n:,})" for name, n in sorted(totals.runtimes.items())),
        "agent programs": ", ".join(f"{name} ({n:,})" for name, n in sorted(totals.harnesses.items())),
        "rewards": rewards,
        "model calls": f"{totals.calls:,}",
        "traces": f"{totals.traces:,} by `{options.strategy}` of {', '.join(options.roles)} calls{cut}",
        "sampled tokens": str(totals.ledger),
        "model": public_model(str(metadata.get("model", ""))),
        "tokenizer, SHA-256": _code(metadata, "tokenizer_sha256"),
        "chat template, SHA-256": _code(metadata, "chat_template_sha256"),
    }
    return ["| | |", "| --- | --- |", *(f"| {_cell(name)} | {_cell(fact)} |" for name, fact in facts.items() if fact)]


def _code(metadata: Mapping[str, Any], key: str) -> str:
    return f"`{metadata[key]}`" if metadata.get(key) else ""


def _column_table() -> str:
    rows = [
        f"| {', '.join(f'`{name}`' for name in names.split(', '))} | {meaning} |"
        for names, meaning in TRACE_COLUMNS.items()
    ]
    return "\n".join(["| column | |", "| --- | --- |", *rows])


def _cell(text: str) -> str:
    """Return text, for example of a task file or a preset, escaped for a cell of a Markdown table."""
    return " ".join(text.replace("|", "\\|").split())
