"""Judging what an agent made, in a fresh copy of the start."""
