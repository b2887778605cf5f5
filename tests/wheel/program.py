"""Python and its scripts in a process of their own, which does not see the checkout."""

import subprocess
import sys
from pathlib import Path


def run(*command):
    return subprocess.run(
        list(map(str, command)), stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def python(*arguments):
    return run(sys.executable, "-I", *arguments)


def script(name):
    return Path(sys.executable).with_name(name)
