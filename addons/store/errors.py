"""Errors that the user of a run folder can mend."""


class RunError(Exception):
    """A folder that cannot be read or written; the message says what to do."""
