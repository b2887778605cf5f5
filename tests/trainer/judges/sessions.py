"""Sessions that an agent has left, and judging them with a real runtime."""

import os
import re
import sys
from dataclasses import dataclass, field, replace

from rolltap.trainer.boxes.process import ProcessRuntime
from rolltap.trainer.judges.changes import AgentFolders
from rolltap.trainer.judges.judge import fault_on_start, judge, prepare_ahead
from rolltap.trainer.judges.layout import JudgeJob
from rolltap.trainer.tasks.content import Start
from rolltap.trainer.tasks.task import Task


class Left:
    """A session of a task whose start has `files`; the agent did `did`, and its folders are
    `workspace` and `home`."""

    def __init__(self, folder, files, runtime=None, *, did=None):
        self.folder = folder
        # judgements of baselines are kept by this digest
        self.start = Start(folder / "start", str(folder))
        self.workspace = folder / "session/workspace"
        self.home = folder / "session/home"
        self.logs = folder / "logs"
        self.runtime = runtime or ProcessRuntime()
        self.start.folder.mkdir(parents=True)
        write(self.start.folder, files)
        self.start.copy_to(self.workspace)
        self.home.mkdir(parents=True)
        self.logs.mkdir()
        self.do(did or {})

    def do(self, files):
        """Write files as the agent; None deletes one."""
        write(self.workspace, files)

    def job(self, spec, instruction="Mend it.", **given):
        task = Task(id="t", instruction=instruction, judge=spec)
        return JudgeJob(
            task=task,
            start=self.start,
            runtime=self.runtime,
            folders=AgentFolders(self.workspace, self.home),
            name="t-0",
            logs=self.logs,
            **given,
        )

    async def fault_on_start(self, spec):
        return await fault_on_start(replace(self.job(spec), folders=None))

    async def judge(self, spec, instruction="Mend it.", **given):
        job = self.job(spec, instruction, **given)
        ahead = prepare_ahead(job)  # where a runtime isolates, as in a rollout
        try:
            return await judge(replace(job, ahead=ahead))
        finally:
            if ahead is not None:
                await ahead.close()

    async def earns(self, reward, spec, *instruction):
        """Judge the session, assert its reward, and return the evidence."""
        judged = await self.judge(spec, *instruction)
        assert (judged.reward, judged.unjudged) == (reward, None), self.log
        return judged.evidence

    async def is_unjudged(self, spec, **given):
        """Judge the session, assert that it has no reward, and return why."""
        judged = await self.judge(spec, **given)
        assert judged.reward is None
        return judged.unjudged

    @property
    def log(self):
        return (self.logs / "t-0.judge.log").read_text()


def nest(root, depth, name="d"):
    """Make `depth` folders, each in the one before: deeper than a path can name."""
    folder = os.open(root, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=folder)
        below = os.open(name, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    os.close(folder)


def command(*words, **fields):
    return {"kind": "command", "command": [*words], **fields}


def shell(script, **fields):
    return command("sh", "-c", script, **fields)


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            path.unlink()
        else:
            path.write_text(text)


@dataclass
class Case:
    """A case of `read_cases`."""

    fields: dict = field(default_factory=dict)
    files: dict = field(default_factory=dict)

    def below(self, folder):
        """Return the files below a folder, by their paths there."""
        found = {}
        for path, text in self.files.items():
            if path.startswith(f"{folder}/"):
                found[path.removeprefix(f"{folder}/")] = text
        return found


def read_cases(text, **texts):
    """Return the cases of a text by their names.

    A case is a line `== NAME`, lines `KEY: VALUE`, and its files: each is a line `-- PATH` and what
    follows. A file that is `(deleted)` is None. `<KEY>` stands for one of `texts`, and `<python>`
    for this Python.
    """
    texts["python"] = sys.executable
    for name, value in texts.items():
        text = text.replace(f"<{name}>", value)
    cases = {}
    for block in re.split("^== ", text, flags=re.MULTILINE)[1:]:
        head, *files = block.split("\n-- ")
        name, *lines = head.strip().splitlines()
        case = cases[name] = Case()
        for line in lines:
            key, _, value = line.partition(": ")
            case.fields[key] = value
        for file in files:
            path, _, content = file.partition("\n")
            content = content.rstrip("\n")
            if path.endswith(" (deleted)"):
                case.files[path.removesuffix(" (deleted)")] = None
            else:
                case.files[path] = f"{content}\n" if content else ""
    return cases
