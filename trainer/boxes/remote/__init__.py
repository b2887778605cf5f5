"""Boxes on a machine that this user reaches by ssh."""
