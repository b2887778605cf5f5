"""Types of the arguments and results of `rolltap`'s functions, for annotations.

Callers construct only those of tasks, rollouts and runtimes: judges, `Limits`, `Budget`, and what a `Runtime` of their
own is made of.
"""

from rolltap.addons.store.records import CallKind, CallRole, CallStatus, SessionStatus, VersionSpan
from rolltap.runs import RunTraces
from rolltap.trainer.rollouts.config import Budget, RolloutConfig
from rolltap.trainer.rollouts.runtimes.runtime import Box, BoxSpec, Ended, Mount, Runtime
from rolltap.trainer.runs.edit import LeftBehind, SplitBy
from rolltap.trainer.runs.exports import ExportFormat
from rolltap.trainer.runs.import_calls import ImportSummary
from rolltap.trainer.runs.verify import Finding, Verification
from rolltap.trainer.runs.views.check import CheckReport, CheckRow, ScoredToken
from rolltap.trainer.runs.views.inspect import CallNode, CallView, Divergence, SessionView
from rolltap.trainer.runs.views.outcomes import MixedGroup, OutcomeRow, PartRow, ProvenanceRow, SuspicionRow
from rolltap.trainer.runs.views.report import SessionRow, Summary, VersionRewards
from rolltap.trainer.tasks.task import (
    CommandJudge,
    Limits,
    LLMJudge,
    PytestJudge,
    PythonJudge,
    SeveralJudges,
    WeightedJudge,
)
from rolltap.trainer.traces.build import TRAINED_ROLES, KindSpan, Strategy, Unrewarded
from rolltap.trainer.traces.ledger import LeftOut
from rolltap.trainer.traces.reader import RecordedCalls, RecordedSession
from rolltap.trainer.traces.sessions import Totals, TracedSession

__all__ = [
    "TRAINED_ROLES",
    "Box",
    "BoxSpec",
    "Budget",
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
    "RolloutConfig",
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
