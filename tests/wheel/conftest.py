"""Tests of rolltap as it is installed. tests/run.sh runs them in environments that have the wheel
and no checkout."""

import sysconfig
from pathlib import Path

import rolltap

INSTALLED = Path(rolltap.__file__).is_relative_to(sysconfig.get_path("purelib"))

collect_ignore_glob = [] if INSTALLED else ["test_*.py"]
"""Checkouts are on the path, and have no wheel to test."""
