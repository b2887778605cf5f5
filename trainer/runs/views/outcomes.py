"""Sessions by outcome, task, weights and program, in counts and rewards.

All means of rewards, here and in the views, are those of `rewards_by`.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import fmean
from typing import TypeVar, get_args

from rolltap.addons.store.records import Session, SessionStatus
from rolltap.trainer.names import Version
from rolltap.trainer.runs.suspicions.rules import RULES
from rolltap.trainer.traces.sessions import session_reward

COMPARED = (
    "harness",
    "harness_version",
    "program_digest",
    "task_digest",
    "runtime",
    "image_digest",
)
"""Fields that are the same in all sessions of a group whose rewards can be compared."""
_program = attrgetter("harness", "harness_version", "program_digest", "runtime", "image_digest")

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class RewardSummary:
    """Sessions that have something in common, and the rewards of those that have one."""

    sessions: list[Session] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    @property
    def mean_reward(self) -> float | None:
        """Mean of the rewards; None without one."""
        if not self.rewards:
            return None
        return fmean(self.rewards)

    @property
    def counts(self) -> tuple[int, int, float | None]:
        """Number of the sessions, of those with a reward, and the mean reward."""
        return len(self.sessions), len(self.rewards), self.mean_reward


@dataclass(frozen=True, slots=True)
class OutcomeRow:
    """Sessions of one status. The mean is over those with a reward."""

    status: str
    sessions: int
    rewarded: int
    mean_reward: float | None


@dataclass(frozen=True, slots=True)
class TaskRow:
    """Sessions of one task, in all its groups. The mean is over those with a reward."""

    task_id: str
    sessions: int
    rewarded: int
    mean_reward: float | None


@dataclass(frozen=True, slots=True)
class VersionRewards:
    """Rewards of the sessions of one policy version."""

    policy_version: str
    """As `weights_name` returns it."""
    sessions: int
    mean_reward: float | None
    best_reward: float | None


@dataclass(frozen=True, slots=True)
class PartRow:
    """A part of the rewards: the number of sessions with a reward that have it, and its mean over
    them."""

    name: str
    sessions: int
    mean: float


@dataclass(frozen=True, slots=True)
class SuspicionRow:
    """A rule that sessions matched: their number, and the number of all matches."""

    rule: str
    sessions: int
    matches: int
    looks_for: str
    cannot_see: str


@dataclass(frozen=True, slots=True)
class ProvenanceRow:
    """Sessions that ran the same program in the same place. Empty texts are not known."""

    harness: str
    harness_version: str
    program_digest: str
    runtime: str
    image_digest: str
    sessions: int


@dataclass(frozen=True, slots=True)
class MixedGroup:
    """A group whose sessions differ in more than the agent's choices: field -> its values."""

    group_id: str
    values: dict[str, list[str]]


def rewards_by(
    sessions: Iterable[Session], key: Callable[[Session], Key]
) -> dict[Key, RewardSummary]:
    """Return key -> the sessions that have it, in the order of their first ones.

    A session whose key is empty is in no group.
    """
    found: defaultdict[Key, RewardSummary] = defaultdict(RewardSummary)
    for session in sessions:
        value = key(session)
        if not value:
            continue
        found[value].sessions.append(session)
        reward = session_reward(session)
        if reward is not None:
            found[value].rewards.append(reward)
    return dict(found)


def outcome_rows(sessions: Iterable[Session]) -> list[OutcomeRow]:
    """Return a row for each status that occurs, in the order of `SessionStatus`."""
    found = rewards_by(sessions, attrgetter("status"))
    statuses = get_args(SessionStatus)
    return [OutcomeRow(name, *found[name].counts) for name in statuses if name in found]


def task_rows(sessions: Iterable[Session]) -> list[TaskRow]:
    """Return a row for each task, by its id."""
    found = rewards_by(sessions, attrgetter("task_id"))
    return [TaskRow(task_id, *group.counts) for task_id, group in sorted(found.items())]


def task_rewards(sessions: Iterable[Session]) -> dict[str, list[float]]:
    """Return task id -> the rewards of its sessions, in their order. Tasks without one are left
    out."""
    found = rewards_by(sessions, attrgetter("task_id"))
    return {task_id: group.rewards for task_id, group in found.items() if group.rewards}


def reward_steps(sessions: Iterable[Session]) -> list[VersionRewards]:
    """Return a row for each policy version, in the order of their first use."""
    started = sorted(sessions, key=attrgetter("started_at"))
    rows = []
    for version, group in rewards_by(started, weights_name).items():
        best = max(group.rewards, default=None)
        rows.append(VersionRewards(version, len(group.sessions), group.mean_reward, best))
    return rows


def weights_name(session: Session) -> str:
    """Return the policy version of a session without its attempt: the attempts at a step have the
    same weights.

    A version of another form stays as it is. Without one the name is `default`, as in vLLM.
    """
    name = session.policy_version or "default"
    version = Version.parse(name)
    if version is None:
        return name
    return f"{version.run}.{version.step}"


def part_rows(sessions: Iterable[Session]) -> list[PartRow]:
    """Return a row for each part of the rewards, by name."""
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for session in _rewarded(sessions):
        for name, value in session.parts.items():
            parts[name].append(value)
    return [PartRow(name, len(values), fmean(values)) for name, values in sorted(parts.items())]


def suspicion_rows(suspicions: Iterable[Mapping[str, int]]) -> list[SuspicionRow]:
    """Return a row for each rule that a session matched, in the order of the rules; unknown ones
    last.

    `suspicions` are rule -> count of each session.
    """
    sessions = Counter[str]()
    matches = Counter[str]()
    for counts in suspicions:
        sessions.update(name for name, count in counts.items() if count)
        matches.update(counts)
    known = {rule.name: (rule.looks_for, rule.cannot_see) for rule in RULES}
    unknown = sorted(sessions.keys() - known.keys())
    rows = []
    for name in [*known, *unknown]:
        if sessions[name]:
            texts = known.get(name, ("", ""))
            rows.append(SuspicionRow(name, sessions[name], matches[name], *texts))
    return rows


def provenance_rows(sessions: Iterable[Session]) -> list[ProvenanceRow]:
    """Return a row for each program and place, by their names."""
    counts: Counter[tuple[str, str, str, str, str]] = Counter(map(_program, sessions))
    return [ProvenanceRow(*program, count) for program, count in sorted(counts.items())]


def mixed_groups(sessions: Iterable[Session]) -> list[MixedGroup]:
    """Return the groups whose sessions with a reward ran other programs, tasks or places, by id.

    A field that is empty in a session is not known, and is left out.
    """
    mixed = []
    found = rewards_by(_rewarded(sessions), attrgetter("group_id"))
    for group_id, group in sorted(found.items()):
        different = {}
        for name in COMPARED:
            values = set(map(attrgetter(name), group.sessions)) - {""}
            if len(values) > 1:
                different[name] = sorted(values)
        if different:
            mixed.append(MixedGroup(group_id, different))
    return mixed


def _rewarded(sessions: Iterable[Session]) -> Sequence[Session]:
    # several judges leave the parts of those that could judge in a session without a reward
    return [session for session in sessions if session_reward(session) is not None]
