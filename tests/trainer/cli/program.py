"""The `rolltap` command as a subprocess, and a small program to run under it."""

import subprocess
import sys
from pathlib import Path

ROLLTAP = Path(sys.executable).with_name("rolltap")
HELLO = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
ASK = f"""
import httpx, sys
reply = httpx.post("https://api.openai.com/v1/chat/completions", json={HELLO!r}, timeout=60)
print(reply.json()["choices"][0]["message"]["content"])
sys.exit(3)
"""


def run_rolltap(*arguments, **kwargs):
    command = [ROLLTAP, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **kwargs)
