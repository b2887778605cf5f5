"""The kinds of `rolltap.RolltapError`. A caller that handles them alike catches the base."""

from rolltap.addons.errors import *  # noqa: F403

__all__ = [name for name in dir() if not name.startswith("_")]
