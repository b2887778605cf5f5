"""Recorded sessions used again: a rerun of their programs without an engine."""
