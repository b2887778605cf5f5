"""The plan of a training: memory, sessions and refusals, computed before anything starts."""
