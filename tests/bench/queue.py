"""The queue in virtual time: what the phases of sessions are worth, and what the queue costs.

Sessions run log-normal times with sigma 1, the median of which is 1. `busy` is the share of the
slots for running that run, over the whole time.
"""

import time

import click

from rolltap.trainer.rollouts.queue import SessionQueue, Slots
from tests.bench.frame import Rows, command
from tests.trainer.rollouts.simulated import long_tailed, simulate

SESSIONS_OF_A_GROUP = 8


@command
@click.option("--sessions", default=1000, help="Sessions, in groups of 8.")
@click.option("--slots", default=32, help="Sessions that run at a time.")
@click.option("--prepare", default=0.1, help="To prepare a session, of the median to run.")
@click.option("--judge", default=0.1, help="To judge a session, of the median to run.")
def main(sessions: int, slots: int, prepare: float, judge: float) -> dict[str, Rows]:
    """Run the same sessions with one slot for all phases, and with slots of their own."""
    phases = long_tailed(0, prepare=prepare, judge=judge)
    groups = []
    for group in range(sessions // SESSIONS_OF_A_GROUP):
        groups.append([f"{group}-{index}" for index in range(SESSIONS_OF_A_GROUP)])
    run = sum(phases(session_id)[1] for group in groups for session_id in group)

    def one_slot(session_id: str) -> tuple[float, float, float]:
        return 0.0, sum(phases(session_id)), 0.0

    rows: Rows = []
    for name, times, given in (
        ("one slot for all", one_slot, Slots(slots, slots, slots, slots)),
        ("ready 0", phases, Slots(slots, 0, slots, slots)),
        ("ready 4", phases, Slots(slots, 4, slots, slots)),
        (f"ready {slots}", phases, Slots(slots, slots, slots, slots)),
        ("ready 4, preparing 4", phases, Slots(4, 4, slots, slots)),
        ("ready 4, judging 4", phases, Slots(slots, 4, slots, 4)),
    ):
        began = time.process_time()
        queue = SessionQueue()
        queue.add_node("", given)
        seen = simulate(queue, groups, times)
        taken = time.process_time() - began
        overtaken = 0
        for number in range(1, len(groups)):
            overtaken += seen.closed[f"g{number}"] < seen.closed[f"g{number - 1}"]
        row = {
            "case": name,
            "sessions a unit of time": sessions / seen.end,
            "busy": run / slots / seen.end,
            "groups overtaken": overtaken,
            "CPU us a session": 1e6 * taken / sessions,
        }
        rows.append(row)
    return {f"{sessions} sessions, {slots} slots": rows}


if __name__ == "__main__":
    main()
