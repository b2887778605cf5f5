"""A run for people."""
