"""Types of the arguments and results of `rolltap`'s functions, for annotations. Callers need not construct them."""

from rolltap.addons.store.records import CallKind, CallRole, CallStatus, SessionStatus, VersionSpan
from rolltap.runs import ExportFormat
from rolltap.traces import RunTraces
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
    "CallKind",
    "CallNode",
    "CallRole",
    "CallStatus",
    "CallView",
    "CheckReport",
    "CheckRow",
    "Divergence",
    "ExportFormat",
    "Finding",
    "ImportSummary",
    "KindSpan",
    "LeftBehind",
    "LeftOut",
    "MixedGroup",
    "OutcomeRow",
    "PartRow",
    "ProvenanceRow",
    "RecordedCalls",
    "RecordedSession",
    "RunTraces",
    "ScoredToken",
    "SessionRow",
    "SessionStatus",
    "SessionView",
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
]
