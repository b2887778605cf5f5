"""A judge that now and then kills before it judges: `chaos.py FOLDER`. `FOLDER/acts.json` says what
at which call.

`judge` is itself, `agents` all harnesses that run, `recorder`, `rollout`, and `engine` the process
group of `FOLDER/engine.pid`. Its reward is 1 when answer.txt has the number 7, which is the part
`lines`.
"""

import fcntl
import json
import os
import signal
import sys
from pathlib import Path


def count(folder: Path) -> int:
    """Return how often this was called, by any process."""
    with (folder / "calls").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(".")
        file.flush()
        return os.path.getsize(file.name)


def kill(act: str, folder: Path) -> None:
    """Kill what the act names, of the rollout into `FOLDER/run`."""
    names = {"agents": b"mini", "recorder": b"mitmdump", "rollout": b"rollout"}
    if act == "judge":
        os.kill(os.getpid(), signal.SIGKILL)
    if act == "engine":
        return os.killpg(int((folder / "engine.pid").read_text()), signal.SIGKILL)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            ours = str(folder).encode() in (process / "environ").read_bytes()
            if ours and any(
                Path(os.fsdecode(word)).name.encode() == names[act] for word in words[:4]
            ):
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:
            continue


def main(folder: Path) -> None:
    act = json.loads((folder / "acts.json").read_text()).get(str(count(folder)))
    if act:
        with (folder / "done").open("a") as file:
            file.write(f"{act}\n")
        kill(act, folder)
    answer = Path("answer.txt")
    text = answer.read_text(errors="replace").strip() if answer.is_file() else ""
    lines = float(text) if text.isdigit() else -1.0
    verdict = {"reward": float(lines == 7), "parts": {"lines": lines}}
    os.write(int(os.environ["ROLLTAP_REWARD_FD"]), json.dumps(verdict).encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
