"""The kinds of `rolltap.RolltapError`. A caller that handles them alike catches the base."""

from rolltap.addons.errors import EngineError as EngineError
from rolltap.addons.errors import HubError as HubError
from rolltap.addons.errors import InputError as InputError
from rolltap.addons.errors import LedgerError as LedgerError
from rolltap.addons.errors import MissingPackageError as MissingPackageError
from rolltap.addons.errors import RankError as RankError
from rolltap.addons.errors import RecorderError as RecorderError
from rolltap.addons.errors import RolltapError as RolltapError
from rolltap.addons.errors import RunError as RunError
from rolltap.addons.errors import UnreadableModelError as UnreadableModelError

__all__ = [name for name in dir() if not name.startswith("_")]
