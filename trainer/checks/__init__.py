"""Trying tasks before a rollout: the start, the solution, and the standard cheats."""
