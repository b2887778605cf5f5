"""The traces of a run: iterated over, as a batch, as a dataset."""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from rolltap.trainer.progress import progress_bar
from rolltap.trainer.traces.build import Trace, TraceBatch
from rolltap.trainer.traces.reader import count_sessions
from rolltap.trainer.traces.sessions import Totals, TracedSession, TraceOptions, iter_traces, load_batch


class RunTraces:
    """The traces of a run, by one strategy. Iterating yields `Trace`s, session by session, in bounded memory."""

    def __init__(self, run: Path, options: TraceOptions) -> None:
        self._run, self._options = run, options

    def __iter__(self) -> Iterator[Trace]:
        for traced in self.by_session(progress=False):
            yield from traced.traces

    def by_session(self, *, progress: bool = True) -> Iterator[TracedSession]:
        """Yield every session with its traces and its ledger. Sessions without a reward have traces here."""
        total = count_sessions(self._run) if progress else 0
        with progress_bar(show=progress) as advance:
            for done, traced in enumerate(iter_traces(self._run, self._options), 1):
                yield traced
                advance("sessions", done, total)

    def batch(self, session_ids: Collection[str] | None = None) -> TraceBatch:
        """Return all traces as one batch for `TraceGRPOTrainer`; with `session_ids`, the traces of these sessions.

        The batch has the reward of every session that has one. Tokens of the others are left out for a reason of
        `LeftOut`. Groups of equal rewards are in the batch; their advantages are 0. The ledger has been checked against
        the traces. Set `on_policy` of the batch when the weights to be trained sampled it.

        Raises `InputError` for a session that is not in the run.
        """
        return load_batch(self._run, session_ids, self._options)

    def totals(self, each: Callable[[Trace], None] | None = None, *, progress: bool = True) -> Totals:
        """Count sessions, calls, traces, rewards and tokens. `each` is called with every trace."""
        totals = Totals()
        deque(self._counted(totals, each, progress), maxlen=0)
        return totals

    def save(self, out: str | Path, each: Callable[[Trace], None] | None = None, *, progress: bool = True) -> Totals:
        """Write the traces to the new folder `out`, a dataset for `datasets.load_from_disk` with a card.

        Returns the counts. `each` is called with every trace. Raises `RunError` when `out` is not empty.
        """
        # datasets takes a second to import
        from rolltap.trainer.runs.exports.card import traces_card
        from rolltap.trainer.runs.exports.traces import save_traces

        totals = Totals()
        sessions = self._counted(totals, each, progress)
        save_traces(sessions, Path(out), lambda: traces_card(self._run, self._options, totals))
        return totals

    def _counted(self, totals: Totals, each: Callable[[Trace], None] | None, progress: bool) -> Iterator[TracedSession]:
        for traced in self.by_session(progress=progress):
            totals.add(traced)
            if each is not None:
                for trace in traced.traces:
                    each(trace)
            yield traced
        totals.ledger.check()
