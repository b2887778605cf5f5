"""A task: an instruction, the workspace to start from, and the judge of the result."""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from rolltap.trainer.rollouts.judges.spec import CommandJudge, Judge
from rolltap.trainer.rollouts.tasks.content import content_digest
from rolltap.trainer.rollouts.tasks.limits import Limits


def _inside(name: str) -> str:
    if Path(name).is_absolute() or ".." in Path(name).parts or ".git" in Path(name).parts:
        raise ValueError("give a path inside the workspace, relative to it")
    return name


class Task(BaseModel):
    """An instruction, the workspace to start from, and the judge of the result.

    A task file is JSON Lines with these fields as keys. Paths in it are relative to the file. The constructor raises
    pydantic's `ValidationError`, a `ValueError`, for wrong fields.

    Attributes:
        id: Name of the task in the dataset: letters, digits, dot, dash and underscore.
        instruction: Prompt for the harness.
        workspace: Folder of which every session gets a copy. None: an empty folder, or the folder `workdir` of the
            image. A git checkout in it has the history up to its commit, and nothing else of its repository.
        commit: Id of the commit that the checkout or bare repository `workspace` starts at; None: what is checked out,
            with its changes. Of a workspace in the image the files stay, and the history ends there.
        files: Path in the workspace -> file or folder of this machine that is laid there, over what `workspace` has.
        image: Container image that the session runs in, or the absolute path of a root folder; None: none. The runtime
            must have images then, unless `image_optional`.
        image_optional: True: a runtime without images takes this machine's system folders instead. The workspace never
            starts with the image's `workdir` then.
        workdir: Absolute path of the workspace in a runtime with files of its own.
        timeout: Seconds after which the harness is stopped; None: the rollout's.
        limits: Limits of the session's box.
        env: Further environment variables of the harness and of the judge.
        needs_network: Place where the task, or its judge, asks for a network beyond the recorder, in words; None:
            nowhere. Only the runtime `process` runs such a task, and none one whose judge has `mounts` or `writable`.
        judge: Description of the judge.
        evaluate: Short form of a `CommandJudge` with this command. A task has either `judge` or `evaluate`.
        source: Where the task is from, for people: a folder, or a file and its row.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9._-]*[A-Za-z0-9_-][A-Za-z0-9._-]*$")
    instruction: str = Field(min_length=1)
    workspace: Path | None = None
    commit: str | None = Field(default=None, pattern=r"^[0-9a-f]{7,64}$")
    files: dict[Annotated[str, AfterValidator(_inside)], Path] = {}
    image: str | None = Field(default=None, min_length=1)
    image_optional: bool = False
    workdir: str = Field(default="/workspace", pattern=r"^/[^/].*$")
    timeout: float | None = Field(default=None, gt=0)
    limits: Limits = Limits()
    env: dict[str, str] = {}
    needs_network: str | None = None
    evaluate: list[str] = []
    judge: Judge | None = None
    source: str = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.evaluate and self.judge is None:
            raise ValueError("'evaluate' is missing: give the judge's command, or a table 'judge'")
        if self.evaluate and self.judge is not None:
            raise ValueError("'evaluate' and 'judge' are both given: remove 'evaluate', the short form")
        if self.commit is not None and self.workspace is None and self.image is None:
            raise ValueError(
                f"'commit' is {self.commit!r} without a checkout: give 'workspace', or an 'image' with one"
            )
        return self

    @property
    def effective_judge(self) -> Judge:
        """The judge, also of a task with the short form."""
        return self.judge if self.judge is not None else CommandJudge(command=self.evaluate)

    def digest(self) -> str:
        """Return the SHA-256 of the task, in hexadecimal: the same task elsewhere has the same.

        Of each path that the task names the content counts instead, and of `workspace` with a `commit` the commit; of
        an image its name. `source` does not count. The code of a `PythonJudge` is not covered. Raises `InputError` for
        a path that cannot be read.
        """
        fields = self.model_dump(exclude={"source", "evaluate", "judge"} | ({"workspace"} if self.commit else set()))
        fields["judge"] = self.effective_judge.model_dump()
        text = json.dumps(fields, sort_keys=True, default=lambda value: content_digest(Path(value)))
        return hashlib.sha256(text.encode()).hexdigest()
