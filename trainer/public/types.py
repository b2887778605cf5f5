"""Types of the arguments and results of `rolltap`'s functions, for annotations.

Callers construct only those of tasks, rollouts and runtimes: judges, `Limits`, `Budget`, and what a
`Runtime` of their own is made of.
"""

from rolltap.addons.store.records import CallKind as CallKind
from rolltap.addons.store.records import CallRole as CallRole
from rolltap.addons.store.records import CallStatus as CallStatus
from rolltap.addons.store.records import SessionStatus as SessionStatus
from rolltap.addons.store.records import VersionSpan as VersionSpan
from rolltap.runs import RunTraces as RunTraces
from rolltap.trainer.boxes.runtime import Box as Box
from rolltap.trainer.boxes.runtime import BoxSpec as BoxSpec
from rolltap.trainer.boxes.runtime import Ended as Ended
from rolltap.trainer.boxes.runtime import Mount as Mount
from rolltap.trainer.boxes.runtime import Runtime as Runtime
from rolltap.trainer.checks.trial import TaskCheck as TaskCheck
from rolltap.trainer.checks.trial import Weakness as Weakness
from rolltap.trainer.rollouts.config import Budget as Budget
from rolltap.trainer.rollouts.config import RolloutConfig as RolloutConfig
from rolltap.trainer.runs.edit import SplitBy as SplitBy
from rolltap.trainer.runs.exports import ExportFormat as ExportFormat
from rolltap.trainer.runs.import_calls import ImportSummary as ImportSummary
from rolltap.trainer.runs.merge import LeftBehind as LeftBehind
from rolltap.trainer.runs.verify import Finding as Finding
from rolltap.trainer.runs.verify import Verification as Verification
from rolltap.trainer.runs.views.calls import CallView as CallView
from rolltap.trainer.runs.views.calls import Divergence as Divergence
from rolltap.trainer.runs.views.check import CheckReport as CheckReport
from rolltap.trainer.runs.views.check import CheckRow as CheckRow
from rolltap.trainer.runs.views.check import ScoredToken as ScoredToken
from rolltap.trainer.runs.views.compare import Difference as Difference
from rolltap.trainer.runs.views.evaluation import Comparison as Comparison
from rolltap.trainer.runs.views.evaluation import Interval as Interval
from rolltap.trainer.runs.views.evaluation import PassRow as PassRow
from rolltap.trainer.runs.views.inspect import CallNode as CallNode
from rolltap.trainer.runs.views.inspect import SessionView as SessionView
from rolltap.trainer.runs.views.outcomes import MixedGroup as MixedGroup
from rolltap.trainer.runs.views.outcomes import OutcomeRow as OutcomeRow
from rolltap.trainer.runs.views.outcomes import PartRow as PartRow
from rolltap.trainer.runs.views.outcomes import ProvenanceRow as ProvenanceRow
from rolltap.trainer.runs.views.outcomes import SuspicionRow as SuspicionRow
from rolltap.trainer.runs.views.outcomes import TaskRow as TaskRow
from rolltap.trainer.runs.views.outcomes import VersionRewards as VersionRewards
from rolltap.trainer.runs.views.report import Summary as Summary
from rolltap.trainer.runs.views.score import ScoreReport as ScoreReport
from rolltap.trainer.runs.views.sessions import SessionRow as SessionRow
from rolltap.trainer.runs.views.sessions import Sort as Sort
from rolltap.trainer.runs.views.training import StepRow as StepRow
from rolltap.trainer.runs.views.training import TrainingView as TrainingView
from rolltap.trainer.service.client import Event as Event
from rolltap.trainer.service.requests import GroupView as GroupView
from rolltap.trainer.tasks.task import CommandJudge as CommandJudge
from rolltap.trainer.tasks.task import Limits as Limits
from rolltap.trainer.tasks.task import LLMJudge as LLMJudge
from rolltap.trainer.tasks.task import PytestJudge as PytestJudge
from rolltap.trainer.tasks.task import PythonJudge as PythonJudge
from rolltap.trainer.tasks.task import SeveralJudges as SeveralJudges
from rolltap.trainer.tasks.task import WeightedJudge as WeightedJudge
from rolltap.trainer.traces.build import TRAINED_ROLES as TRAINED_ROLES
from rolltap.trainer.traces.build import KindSpan as KindSpan
from rolltap.trainer.traces.build import Strategy as Strategy
from rolltap.trainer.traces.build import Unrewarded as Unrewarded
from rolltap.trainer.traces.ledger import LeftOut as LeftOut
from rolltap.trainer.traces.ledger import SessionAccount as SessionAccount
from rolltap.trainer.traces.reader import RecordedCalls as RecordedCalls
from rolltap.trainer.traces.reader import RecordedSession as RecordedSession
from rolltap.trainer.traces.sessions import Totals as Totals
from rolltap.trainer.traces.sessions import TracedSession as TracedSession
from rolltap.trainer.traces.tables import Score as Score
from rolltap.trainer.traces.trained import TrainedSession as TrainedSession
from rolltap.trainer.viewer.file import WrittenFile as WrittenFile

__all__ = [name for name in dir() if not name.startswith("_")]
