"""Running harnesses on tasks: every session has a copy of the workspace, and proxy credentials of
its own."""
