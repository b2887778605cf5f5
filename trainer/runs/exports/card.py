"""Dataset cards of exported runs: the README.md that the Hub shows, with the metadata that it reads."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from huggingface_hub import DatasetCard, DatasetCardData

from rolltap.addons.store.metadata import read_metadata
from rolltap.trainer.names import public_model
from rolltap.trainer.traces.sessions import Totals, TraceOptions

HERE = "path/to/this/folder"
"""Placeholder in a card for the folder's path, which is not known when the card is written."""

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
"""Descriptions of the columns of traces. A key may name several columns."""

_TEMPLATE = """\
---
{{ card_data }}
---

# {{ pretty_name }}

Rollouts of agent programs as token ids: prompts, sampled tokens with their log-probabilities, and the version of the
weights that sampled them. Recorded and exported by rolltap {{ version }}, which records the model calls of unmodified
agent programs.

| | |
| --- | --- |
{% for name, fact in facts.items() -%}
| {{ name }} | {{ fact }} |
{% endfor %}
## How to load

{% if rows -%}
```python
from datasets import load_dataset

traces = load_dataset("{{ where }}", "traces", split="train")
calls = load_dataset("{{ where }}", "calls", split="train")
```

| config | rows | a row is |
| --- | --- | --- |
| `traces` | {{ "{:,}".format(rows.traces) }} | one sequence to train on |
| `calls` | {{ "{:,}".format(rows.calls) }} | one model call: tokens, messages, reply, sampling parameters, timings |
| `sessions` | {{ "{:,}".format(rows.sessions) }} | one run of an agent program: task, group, outcome, reward, \
evidence, versions |
| `events` | {{ "{:,}".format(rows.events) }} | one other event on the wire: a refused host, a retry, the start of a \
call |
{%- else -%}
```python
from datasets import load_from_disk

traces = load_from_disk("{{ where }}")
```

For TRL's `SFTTrainer`, which takes one sequence and a mask over the whole sequence:

```python
sft = traces.map(
    lambda trace: {
        "input_ids": trace["prompt_ids"] + trace["completion_ids"],
        "assistant_masks": [0] * len(trace["prompt_ids"]) + trace["completion_mask"],
    },
    remove_columns=traces.column_names,
)
```
{%- endif %}

## Traces

A trace is one sequence to train on. Each sampled token is trained by exactly one trace, or left out for a reason that
is counted above. Traces of sessions without a reward are here too, with the reward null; the count above has their
tokens by the reason, for instance `infrastructure`, `unjudged` or `no_reward`. Tokens that the policy did not sample
(tool results, later instructions) have mask 0.

| column | |
| --- | --- |
{% for names, meaning in columns.items() -%}
| `{{ names.replace(", ", "`, `") }}` | {{ meaning }} |
{% endfor %}
{%- if rows %}
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
{% endif %}"""


def dataset_card(
    run: Path, options: TraceOptions, totals: Totals, *, rows: Mapping[str, int] | None = None, where: str = HERE
) -> DatasetCard:
    """Return the card of traces that `load_from_disk(where)` opens.

    With `rows`, config -> number of rows, it is that of Parquet which `load_dataset(where, config)` opens. The shards
    of a config with rows are in the folder of its name.
    """
    configs = [{"config_name": name, "data_files": f"{name}/*.parquet"} for name, n in (rows or {}).items() if n]
    tags = ["rolltap", "agent", "rollouts", "reinforcement-learning", "trl"]
    data = DatasetCardData(pretty_name=run.resolve().name, tags=tags)
    if configs:
        data["configs"] = configs
    card: DatasetCard = DatasetCard.from_template(
        data,
        template_str=_TEMPLATE,
        version=version("rolltap"),
        facts=_facts(run, options, totals),
        columns=TRACE_COLUMNS,
        rows=rows,
        where=where,
    )
    return card


def _facts(run: Path, options: TraceOptions, totals: Totals) -> dict[str, str]:
    metadata = read_metadata(run)
    rewards = f"{totals.rewarded:,} of {totals.sessions:,} sessions"
    if totals.rewarded:
        rewards += f", mean {totals.reward_sum / totals.rewarded:.3f}"
    cut = f", at most {options.max_tokens:,} tokens long" if options.max_tokens else ""
    facts = {
        "sessions": f"{totals.sessions:,}",
        "tasks": f"{len(totals.tasks):,}" if totals.tasks else "",
        "outcomes": _counts(totals.statuses),
        "with suspicions of cheating": f"{totals.suspicious:,} sessions" if totals.suspicious else "",
        "ran in": _counts(totals.runtimes),
        "agent programs": _counts(totals.harnesses),
        "rewards": rewards,
        "model calls": f"{totals.calls:,}",
        "traces": f"{totals.traces:,} by `{options.strategy}` of {', '.join(options.roles)} calls{cut}",
        "sampled tokens": str(totals.ledger),
        "model": public_model(str(metadata.get("model", ""))),
    }
    for name in ("tokenizer", "chat template"):
        if digest := metadata.get(f"{name.replace(' ', '_')}_sha256"):
            facts[f"{name}, SHA-256"] = f"`{digest}`"
    # text of a task file or a preset, escaped for a cell of a Markdown table
    return {name: " ".join(fact.replace("|", "\\|").split()) for name, fact in facts.items() if fact}


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({n:,})" for name, n in sorted(counts.items()))
