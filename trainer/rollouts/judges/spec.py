"""Descriptions of judges: pydantic models that stand in a task."""

from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Judge(BaseModel):
    """Fields of all judges.

    Attributes:
        timeout: Seconds after which judging is stopped. The session is unjudged then.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    timeout: float = Field(default=600.0, gt=0)


class _WorkspaceJudge(_Judge):
    """Fields of the judges that look at a workspace.

    Attributes:
        where: `fresh` (default): a copy of the task's start, to which the agent's changes were applied. `session`: the
            folder and the box that the agent left, with all that it put there.
        paths: Glob patterns, relative to the workspace: only what the agent made under them is applied. None: all.
        protect: Glob patterns, relative to the workspace: what the agent made under them is not applied. It is counted.
        tests: Folder or file that is laid over the workspace after the agent's changes; relative to the task file.
    """

    where: Literal["fresh", "session"] = "fresh"
    paths: list[str] | None = None
    protect: list[str] = []
    tests: Path | None = None


class CommandJudge(_WorkspaceJudge):
    """A command that runs in the workspace.

    Attributes:
        result: Where the reward is. `status`: exit status 0 is 1, exit status 1 is 0, all others are unjudged, and so
            is 1 with an error of Python at the end of the output, unless it is an `AssertionError`.
            `number`: one finite number alone on the last line of the output. `json`: a JSON object as the last line of
            the output: `{"reward": 0.5, "parts": {"speed": 1.0}}`. With these two the command may write it to the file
            that ROLLTAP_REWARD names instead. None: JSON or a number if the last line is one, else the status.
        reward_file: Absolute path in the box of a file that the command writes: its text is the reward, as of the last
            line of the output. None: see `result`.
        mounts: Absolute path in the box -> file or folder of this machine, visible there, read-only. The runtime
            `process` has no paths of its own: the task is refused there.
        writable: Absolute paths in the box of empty folders that the command may write to.
    """

    kind: Literal["command"] = "command"
    command: list[str] = Field(min_length=1)
    result: Literal["status", "number", "json"] | None = None
    reward_file: str | None = Field(default=None, pattern=r"^/[^/]")
    mounts: dict[str, Path] = {}
    writable: list[str] = []
    env: dict[str, str] = {}


class PytestJudge(_WorkspaceJudge):
    """A JUnit XML report, compared with the tests that must pass.

    The reward is 1 when all tests of both lists pass, else 0. Without lists it is 1 when the report has tests and all
    pass. The parts are the shares of both lists that pass.

    Attributes:
        command: Writes the report to the file that ROLLTAP_REPORT names.
        fail_to_pass: Tests that failed before the change, as pytest names them.
        pass_to_pass: Tests that passed before.
        test_patch: Unified diff that is applied after the agent's changes and `tests`. Its files are protected.
        log_parser: Name of a log parser of the `swebench` package (extra `swe`), for instance `parse_log_django`: the
            tests' results are read from the output of `command` then, and no report is needed. None: the report. The
            agent's code can print what the parser takes for results.
    """

    kind: Literal["pytest"] = "pytest"
    command: list[str] = ["python", "-m", "pytest", "-p", "no:cacheprovider", "--junit-xml", "{report}"]
    fail_to_pass: list[str] = []
    pass_to_pass: list[str] = []
    test_patch: str | None = None
    log_parser: str | None = None
    env: dict[str, str] = {}


class PythonJudge(_WorkspaceJudge):
    """A Python function of the user's own, called in a process of its own with the judged workspace.

    Attributes:
        function: `package.module:function`. It gets the folder of the judged workspace, and returns a number or a dict
            as `CommandJudge`'s JSON.
    """

    kind: Literal["python"] = "python"
    function: str = Field(pattern=r"^[\w.]+:[\w.]+$")


class LLMJudge(_Judge):
    """A model that reads the changes and a rubric, at an OpenAI-compatible endpoint.

    Attributes:
        url: Base URL, for instance `https://api.openai.com/v1`. The engine of the policy is refused, unless
            `policy_judges_itself` is true.
        model: Name of the model there.
        key_env: Name of the environment variable with the key.
    """

    kind: Literal["llm"] = "llm"
    rubric: str = Field(min_length=1)
    url: str
    model: str
    key_env: str | None = None
    policy_judges_itself: bool = False


class WeightedJudge(BaseModel):
    """One of several judges: its name among the parts, and its weight in the mean."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1)
    weight: float = Field(default=1.0, gt=0)
    judge: "Judge"


class SeveralJudges(BaseModel):
    """Several judges: the reward is the weighted mean of theirs. When one cannot judge, the session is unjudged."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["several"] = "several"
    judges: list[WeightedJudge] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if len({one.name for one in self.judges}) < len(self.judges):
            raise ValueError("two of the judges have the same name")
        return self


Judge = Annotated[CommandJudge | PytestJudge | PythonJudge | LLMJudge | SeveralJudges, Field(discriminator="kind")]
JUDGE_KINDS: tuple[str, ...] = tuple(kind.model_fields["kind"].default for kind in get_args(get_args(Judge)[0]))
"""Names of the judges: values of `kind`."""
WeightedJudge.model_rebuild()
