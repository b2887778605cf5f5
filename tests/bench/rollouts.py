"""A long rollout on a bad day, with several seeds: is anything lost, run twice, rewarded wrongly or left behind?

    python -m tests.bench.rollouts --model runs/quickstart/model --sessions 64 --seeds 3

Prints one line of JSON for each seed. The status is 1 when something does not add up.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

import rolltap
from rolltap.addons.store.records import UNREWARDED
from rolltap.trainer.rollouts.resume import NOT_RUN, RERUN, place_of
from tests.trainer.rollouts.soak import endure, processes


def acts(sessions: int, seed: int) -> dict[int, str]:
    """Return request -> act: four of them for each 16 sessions, at random requests."""
    rng = random.Random(seed)
    names = ["kill rolltap", "kill the recorder", "restart the engine", "kill rolltap"] * max(1, sessions // 16)
    return dict(zip(rng.sample(range(2, 2 * sessions - 2), len(names)), names, strict=True))


def faults(folder: Path, sessions: int) -> Iterator[str]:
    """Yield all that does not add up, in words."""
    run = rolltap.open_run(folder / "run")
    rows = run.sessions()
    places = {place_of(row.session_id) for row in rows if row.status not in NOT_RUN}
    ended = Counter(place_of(row.session_id) for row in rows if row.status not in RERUN)
    if len(places) != sessions or set(ended.values()) != {1}:
        yield f"{sessions} sessions were to end once: {Counter(ended.values())} of {len(places)} places"
    yield from (f"{row.session_id}: {row.status}, {row.reward}" for row in rows if _is_wrong(row))
    ledger = run.ledger()
    sampled = sum(len(call.completion_ids) for calls in run.calls.values() for call in calls)
    if not ledger.sampled == sampled == ledger.trained + sum(ledger.left_out.values()):
        yield f"{sampled} tokens were sampled: {ledger}"
    if not run.verify(progress=False).sound:
        yield "the run is damaged"
    yield from (f"process {number} is left: {command}" for number, command in processes(str(folder)).items())
    yield from (f"{left} is left" for left in (folder / "tmp").glob("rolltap-*"))


def _is_wrong(row: rolltap.Session) -> bool:
    return (row.reward is not None) if row.status in UNREWARDED else row.reward != 1.0


def measure(tokenizer: Any, sessions: int, seed: int) -> dict[str, Any]:
    """Return the row of one seed."""
    with tempfile.TemporaryDirectory(prefix="rolltap-bench-") as name:
        folder, started = Path(name), time.monotonic()
        starts, done = endure(tokenizer, folder, acts(sessions, seed), sessions=sessions, seed=seed)
        statuses = Counter(row.status for row in rolltap.open_run(folder / "run").sessions())
        return {
            "seed": seed,
            "seconds": round(time.monotonic() - started, 1),
            "starts": starts,
            "acts": Counter(done),
            "statuses": statuses,
            "faults": [*faults(folder, sessions), *([] if starts[-1] == 0 else ["it did not end"])],
        }


def main() -> None:
    """Measure, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=64, help="a multiple of 4")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--model", required=True, help="folder of a tokenizer")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    rows = [measure(tokenizer, arguments.sessions, seed) for seed in range(arguments.seeds)]
    for row in rows:
        print(json.dumps(row))
    sys.exit(any(row["faults"] for row in rows))


if __name__ == "__main__":
    main()
