"""Types of the arguments and results of `rolltap`'s functions, for annotations.

Callers construct only those of tasks and runtimes: judges, `Limits`, and what a `Runtime` of their own is made of."""

from rolltap.addons.store.records import CallKind, CallRole, CallStatus, SessionStatus, VersionSpan
from rolltap.traces import RunTraces
from rolltap.trainer.exports.formats import ExportFormat
from rolltap.trainer.rollouts.judges.spec import (
    CommandJudge,
    LLMJudge,
    PytestJudge,
    PythonJudge,
    SeveralJudges,
    WeightedJudge,
)
from rolltap.trainer.rollouts.runtimes.runtime import Box, BoxSpec, Ended, Mount, Runtime
from rolltap.trainer.rollouts.tasks.limits import Limits
from rolltap.trainer.runs.finding import Finding
from rolltap.trainer.runs.import_calls import ImportSummary
from rolltap.trainer.runs.merge import LeftBehind
from rolltap.trainer.runs.parts import SplitBy
from rolltap.trainer.runs.verify import Verification
from rolltap.trainer.traces.build import TRAINED_ROLES, KindSpan, Strategy, Unrewarded
from rolltap.trainer.traces.ledger import LeftOut
from rolltap.trainer.traces.reader import RecordedCalls, RecordedSession
from rolltap.trainer.traces.sessions import Totals, TracedSession
from rolltap.trainer.views.check import CheckReport, CheckRow, ScoredToken
from rolltap.trainer.views.inspect import CallNode, CallView, Divergence, SessionView
from rolltap.trainer.views.outcomes import MixedGroup, OutcomeRow, PartRow, ProvenanceRow, SuspicionRow
from rolltap.trainer.views.report import Summary, VersionRewards
from rolltap.trainer.views.session_table import SessionRow

__all__ = [
    "TRAINED_ROLES",
    "Box",
    "BoxSpec",
    "CallKind",
    "CallNode",
    "CallRole",
    "CallStatus",
    "CallView",
    "CheckReport",
    "CheckRow",
    "CommandJudge",
    "Divergence",
    "Ended",
    "ExportFormat",
    "Finding",
    "ImportSummary",
    "KindSpan",
    "LLMJudge",
    "LeftBehind",
    "LeftOut",
    "Limits",
    "MixedGroup",
    "Mount",
    "OutcomeRow",
    "PartRow",
    "ProvenanceRow",
    "PytestJudge",
    "PythonJudge",
    "RecordedCalls",
    "RecordedSession",
    "RunTraces",
    "Runtime",
    "ScoredToken",
    "SessionRow",
    "SessionStatus",
    "SessionView",
    "SeveralJudges",
    "SplitBy",
    "Strategy",
    "Summary",
    "SuspicionRow",
    "Totals",
    "TracedSession",
    "Unrewarded",
    "Verification",
    "VersionRewards",
    "VersionSpan",
    "WeightedJudge",
]
