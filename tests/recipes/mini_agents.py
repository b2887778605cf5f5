"""The agents of the miniature: scripted turns of the real programs, in the tools of each.

An instruction ends with the name of the attempt that the agent makes: see `ask` and `ATTEMPTS`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rolltap.trainer.doctor.scripted_engine import Reply, Say, ScriptedEngine
from tests.harness.play import tool_call


@dataclass(frozen=True)
class Edit:
    """A change of one place of a file of the repository."""

    path: str
    old: str
    new: str


@dataclass(frozen=True)
class Run:
    """A command in the agent's shell."""

    command: str


Turn = tuple[str, dict]
"""Name and arguments of the tool that the agent calls."""
SUM = "    return sum(int(number) * UNITS[unit] for number, unit in parts)\n"
SIGNED = """\
    seconds = sum(abs(int(number)) * UNITS[unit] for number, unit in parts)
    return -seconds if parts[0][0].startswith("-") else seconds
"""
REFUSES = """\
    if any(number[0] in "+-" for number, _ in parts[1:]):
        raise ValueError(f"not a duration, only the first part has a sign: {text!r}")
"""
FIX = Edit("spans/reading.py", SUM, REFUSES + SIGNED)

ATTEMPTS: Mapping[str, Sequence[Edit | Run]] = {
    "right": [FIX],
    # the sign counts for all parts, and `1h -30m` is not refused
    "wrong": [Edit("spans/reading.py", SUM, SIGNED)],
    "deletes-tests": [Run("rm -r tests")],
    "breaks-others": [FIX, Edit("spans/writing.py", 'return "0s"', 'return ""')],
    # looks for the fix in all that git has
    "digs": [
        Run("git log --all --oneline; git log --all -p; git reflog --all; git stash list; git remote -v; git tag"),
        Run("git fsck --unreachable --lost-found; ls -R .git; grep -rIh '' .git --exclude-dir={hooks,objects}"),
        Run("git cat-file --batch-all-objects --batch-check"),
        Run("git cat-file --batch-all-objects --batch | tr -cd '[:print:]\\n'"),
    ],
}


def ask(instruction: str, attempt: str) -> str:
    """Return an instruction that names the attempt."""
    return f"{instruction}\n(attempt: {attempt})"


def lead(engine: ScriptedEngine, harness: str, files: Mapping[str, str]) -> None:
    """Let every session of `engine` make the attempt that its instruction names. `files` are those of the start."""

    def reply(request: dict) -> Reply:
        prompt = engine.tokenizer.decode(request["token_ids"])
        if "<tools>" not in prompt:
            return Say("A duration")  # a side question
        (attempt,) = set(re.findall(r"\(attempt: ([\w-]+)\)", prompt))
        turns = [turn for step in ATTEMPTS[attempt] for turn in AGENTS[harness](step, files, _folder(prompt))]
        if harness == "mini-swe-agent":
            turns.append(("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}))
        done = prompt.count("<tool_response>")
        return Say(tool_call(*turns[done]) if done < len(turns) else "Done.")

    engine.otherwise = reply


def _folder(prompt: str) -> str:
    """Return the workspace as Qwen Code says it, whose tools want absolute paths; "" for the others."""
    said = re.search(r"working in the directory: (\S+)", prompt)
    return said[1] if said else ""


def _claude_code(step: Edit | Run, files: Mapping[str, str], folder: str) -> list[Turn]:
    if isinstance(step, Run):
        return [("Bash", {"command": step.command, "description": "Work"})]
    change = {"file_path": step.path, "old_string": step.old, "new_string": step.new}
    return [("Read", {"file_path": step.path}), ("Edit", change)]


def _codex(step: Edit | Run, files: Mapping[str, str], folder: str) -> list[Turn]:
    if isinstance(step, Run):
        return [("exec_command", {"cmd": step.command})]
    lines = _changed_lines(step, files)
    patch = "\n".join(["*** Begin Patch", f"*** Update File: {step.path}", "@@", *lines, "*** End Patch"])
    return [("exec_command", {"cmd": f"apply_patch <<'EOF'\n{patch}\nEOF"})]


def _changed_lines(step: Edit, files: Mapping[str, str]) -> list[str]:
    """Return the lines of a change as those of a patch without context."""
    before = files[step.path].splitlines()
    after = files[step.path].replace(step.old, step.new).splitlines()
    return [f"-{line}" for line in before if line not in after] + [f"+{line}" for line in after if line not in before]


def _qwen_code(step: Edit | Run, files: Mapping[str, str], folder: str) -> list[Turn]:
    if isinstance(step, Run):
        return [("run_shell_command", {"command": step.command, "is_background": False})]
    path = f"{folder}/{step.path}"
    change = {"file_path": path, "old_string": step.old, "new_string": step.new}
    return [("read_file", {"file_path": path}), ("edit", change)]


def _pi(step: Edit | Run, files: Mapping[str, str], folder: str) -> list[Turn]:
    if isinstance(step, Run):
        return [("bash", {"command": step.command, "timeout": None})]
    return [("edit", {"path": step.path, "edits": [{"oldText": step.old, "newText": step.new}]})]


def _mini_swe_agent(step: Edit | Run, files: Mapping[str, str], folder: str) -> list[Turn]:
    if isinstance(step, Run):
        return [("bash", {"command": step.command})]
    text = files[step.path].replace(step.old, step.new)
    return [("bash", {"command": f"cat > {step.path} <<'EOF'\n{text}EOF"})]


AGENTS: Mapping[str, Callable[[Edit | Run, Mapping[str, str], str], list[Turn]]] = {
    "claude-code": _claude_code,
    "codex": _codex,
    "qwen-code": _qwen_code,
    "pi": _pi,
    "mini-swe-agent": _mini_swe_agent,
}
"""Harness -> the turns in which it does one step. Arguments: the step, the files of the start, the workspace."""
