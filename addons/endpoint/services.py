"""The objects that all sessions of a recorder share."""

from dataclasses import dataclass

from rolltap.addons.endpoint.budget import UNBOUNDED, Budgets
from rolltap.addons.endpoint.errors import Refusals
from rolltap.addons.endpoint.recovery import Recovery
from rolltap.addons.endpoint.stored import Archive
from rolltap.addons.engine.policy import PolicyFile
from rolltap.addons.engine.pool import EnginePool
from rolltap.addons.offload import Workers
from rolltap.addons.options import Images
from rolltap.addons.prompts.rendering import Rendering
from rolltap.addons.store.tables import RunWriter


@dataclass(frozen=True, slots=True)
class Services:
    """The objects that all sessions of a recorder share."""

    engines: EnginePool
    policy: PolicyFile
    rendering: Rendering
    writer: RunWriter
    recovery: Recovery
    archive: Archive
    workers: Workers
    patience: float
    """Seconds after an engine failure during which a call is retried: see `Patience`."""
    refusals: Refusals
    keep_adapter: bool = True
    """True when a session keeps its adapter: see `SessionPolicy`."""
    budgets: Budgets = UNBOUNDED
    """Budgets of each session."""
    images: Images = "hide"
    """Treatment of images, audio and files in a conversation."""
