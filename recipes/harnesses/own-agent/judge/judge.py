"""Exit status 0 is the reward 1, and 1 is 0.

It runs where the agent never was, with the agent's answer.txt.
"""

import sys
from pathlib import Path

answer = Path("answer.txt")
lines = Path("words.txt").read_text().splitlines()
right = answer.is_file() and answer.read_text(errors="replace").split() == [str(len(lines))]
sys.exit(0 if right else 1)
