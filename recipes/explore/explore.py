"""Look into a run folder with `datasets`. Does not import rolltap.

    python recipes/explore/explore.py RUN

The cells (`# %%`) also run one by one in an editor that supports them, or as a notebook after
`jupytext --to ipynb`.
"""

# %% Open the run. Each table is a set of Arrow files; a recorder may still append to them.
import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from textwrap import indent, shorten

import numpy as np
from datasets import Dataset, concatenate_datasets

if len(sys.argv) != 2:
    sys.exit("usage: python explore.py RUN")
RUN = Path(sys.argv[1])
WIDTH = shutil.get_terminal_size().columns


def table(name: str) -> Dataset | None:
    """Return the memory-mapped rows of `calls`, `sessions` or `events`; None when there are
    none."""
    files = sorted(RUN.glob(f"{name}-*.arrow"))
    return concatenate_datasets([Dataset.from_file(str(file)) for file in files]) if files else None


calls, sessions = table("calls"), table("sessions")
if calls is None:
    sys.exit(f"{RUN} holds no calls")

# %% Number of calls, by status, role, kind and finish reason.
print(f"{calls.num_rows} calls of {len(calls.unique('session_id'))} sessions")
for column in ("status", "role", "kind", "finish_reason"):
    counts = Counter(calls[column]).most_common()
    print(f"  {column:14}", ", ".join(f"{value} {count}" for value, count in counts))
if sessions is not None:
    # a session that was recorded again has several rows: the last one counts
    rewards = dict(zip(sessions["session_id"], sessions["reward"], strict=True))
    if rewards := [reward for reward in rewards.values() if reward is not None]:
        print(
            f"  {'reward':14} {len(rewards)} sessions, mean {np.mean(rewards):.3f}, best"
            f" {max(rewards):.3f}"
        )

# %% Histogram of the sampled tokens' log-probabilities. Columns are read in batches, so memory is
# bounded.
EDGES = np.array([0, -0.001, -0.01, -0.1, -0.3, -1, -2, -4, -8, -np.inf])[::-1]
counts, sampled = np.zeros(len(EDGES) - 1, dtype=int), 0
for batch in calls.select_columns(["logprobs"]).with_format("arrow").iter(batch_size=256):
    logprobs = batch["logprobs"].combine_chunks().flatten().to_numpy()
    counts += np.histogram(logprobs, EDGES)[0]
    sampled += len(logprobs)
print(f"\n{sampled} sampled tokens by their log-probability")
for low, high, count in zip(EDGES[:-1], EDGES[1:], counts, strict=True):
    share = count / max(sampled, 1)
    print(f"  {low:8g} to {high:<7g} {'█' * round(share * (WIDTH - 40))} {count} ({share:.1%})")

# %% One conversation. A row holds only the messages after its parent's: follow `parent_id` from the
# last call back.
tree = list(calls.select_columns(["session_id", "call_id", "role", "started_at"]))
rows = {(call["session_id"], call["call_id"]): row for row, call in enumerate(tree)}
path = []
row = max(range(len(tree)), key=lambda row: (tree[row]["role"] == "agent", tree[row]["started_at"]))
while row is not None:
    path.insert(0, calls[row])
    row = rows.get((path[0]["session_id"], path[0]["parent_id"]))

print(f"\nthe conversation of session {path[0]['session_id']}, {len(path)} calls")
for call in path:
    reply = (
        json.loads(call["reply"])
        if call["reply"]
        else {"role": "assistant", "content": "(no reply)"}
    )
    for message in [*json.loads(call["messages"]), reply]:
        print(f"[{message['role']}]")
        for text in (message.get("reasoning_content"), message.get("content")):
            if text:
                print(indent(shorten(str(text), 400, placeholder=" ..."), "  "))
        for tool_call in message.get("tool_calls") or []:
            print(
                f"  -> {tool_call['function']['name']}"
                f" {shorten(str(tool_call['function']['arguments']), 300)}"
            )
