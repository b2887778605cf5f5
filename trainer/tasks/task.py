"""A task as data: an instruction, the workspace to start from, the limits of its box, and the judge
of the result."""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from rolltap.addons.errors import InputError
from rolltap.trainer.tasks.bounds import (
    Command,
    Cores,
    Gibibytes,
    Hosts,
    PathInside,
    PlainId,
    Processes,
    Seconds,
    Text,
    Variables,
    Weight,
)
from rolltap.trainer.tasks.box_paths import BoxPath
from rolltap.trainer.tasks.content import content_digest
from rolltap.trainer.toml import describe

MAX_REWARD = 1e6
"""Largest reward or part, and with a minus the smallest: one session must not outweigh all others
of a training."""
Bound = Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD, allow_inf_nan=False)]
"""A number that a reward may be."""


class _Judge(BaseModel):
    """Fields of all judges.

    Attributes:
        timeout: Seconds after which judging is stopped. The session is unjudged then.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    timeout: Seconds = 600.0


class _WorkspaceJudge(_Judge):
    """Fields of the judges that look at a workspace.

    Attributes:
        paths: Glob patterns, relative to the workspace, of the files that the agent is to change:
            nothing else is applied. By default all changes but the changes of the judge's own
            files. Settings of test runners are applied only where a pattern is their path.
        files: Glob patterns, relative to the workspace, of further own files of the judge: see
            `judges/protected.py`.
        tests: Folder or file that is laid over the workspace after the agent's changes; relative to
            the task file.
    """

    paths: list[str] | None = None
    files: list[str] = []
    tests: Path | None = None

    @model_serializer(mode="wrap")
    def _dump(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out an empty `run` and `allow`: the digest of a task is that of its words."""
        values: dict[str, Any] = dump(self)
        for name in ("run", "allow"):
            if not values.get(name):
                values.pop(name, None)
        return values


class _ValueJudge(_WorkspaceJudge):
    """Fields of the judges that give a value.

    Attributes:
        range: Smallest and largest reward.
        run: Command that runs the agent's program before the judge, in a box without `tests` and
            `mounts`: it cannot print what it cannot see. The judge finds what it wrote, as if the
            agent had left it, and none of its processes. `paths` names what it writes, too. Its
            exit status says nothing.
    """

    range: tuple[Bound, Bound] = (0.0, 1.0)
    run: Command = []

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if self.range[0] >= self.range[1]:
            raise ValueError(
                f"'range' is {list(self.range)}: give the smallest reward, then the largest",
            )
        return self


class CommandJudge(_ValueJudge):
    """A command that runs in the workspace.

    Attributes:
        command: The command and its arguments.
        result: Way in which the command gives the reward. `status`: exit status 0 is 1, exit status
            1 is 0, all others are unjudged, and so is 1 without a module that Python needs.
            `number` and `json`: one finite number, or a JSON object (`{"reward": 0.5, "parts":
            {"speed": 1.0}}`), written at once to the file that ROLLTAP_REWARD_FILE names, which is
            opened once: two programs that write give no reward. A Python script (`python [OPTIONS]
            SCRIPT` or `-m MODULE`) writes it to the descriptor that ROLLTAP_REWARD_FD names in its
            place, which its children do not have.
        reward_files: Absolute paths in the box at which the command writes its reward instead. They
            are write-only pipes, and one reward may come out of all of them.
        mounts: Absolute path in the box -> file or folder of this machine, visible there,
            read-only. The runtime `process` has no paths of its own: the task is refused there.
        writable: Absolute paths in the box of empty folders that the command may write to.
        env: Further environment variables of the command.
        allow: Hosts that the command may reach, through the recorder, as `allow` of a task. By
            default its box has no network. `run` has none in any case.
    """

    kind: Literal["command"] = "command"
    command: Command = Field(min_length=1)
    result: Literal["status", "number", "json"] = "status"
    reward_files: list[BoxPath] = []
    mounts: dict[BoxPath, Path] = {}
    writable: list[BoxPath] = []
    env: Variables = {}
    allow: Hosts = []

    @property
    def by_status(self) -> bool:
        """True when the exit status alone is the verdict."""
        return self.result == "status" and not self.reward_files

    @property
    def own_paths(self) -> bool:
        """True when the judge needs paths in a box that are not those of this machine."""
        return bool(self.mounts or self.writable or self.reward_files)


class PytestJudge(_WorkspaceJudge):
    """A JUnit XML report, compared with the tests that must pass.

    The reward is 1 when all tests of both lists pass, else 0. Without lists it is 1 when the report
    has tests and all pass. The parts are the shares of both lists that pass.

    Attributes:
        command: Runs pytest, which a plugin of rolltap's makes report. Another program writes a
            report to the pipe that ROLLTAP_REPORT names, or `{report}` in an argument.
        fail_to_pass: Tests that failed before the change, as pytest names them.
        pass_to_pass: Tests that passed before.
        test_patch: Unified diff that is applied after the agent's changes and `tests`. Its files
            are protected.
        log_parser: Name of a log parser of the `swebench` package (extra `swe`), for instance
            `parse_log_django`: the tests' results are read from the output of `command` then, and
            no report is needed. By default the report is read. The agent's code can print lines
            that the parser takes for results.
        env: Further environment variables of the command.
        allow: Hosts that the tests may reach, through the recorder, as `allow` of a task. By
            default their box has no network.
    """

    kind: Literal["pytest"] = "pytest"
    command: Command = ["python", "-m", "pytest", "-p", "no:cacheprovider"]
    fail_to_pass: list[str] = []
    pass_to_pass: list[str] = []
    test_patch: str | None = None
    log_parser: str | None = None
    env: Variables = {}
    allow: Hosts = []


class PythonJudge(_ValueJudge):
    """A Python function of the user's own, called in a process of its own with the judged
    workspace.

    Attributes:
        function: `package.module:function`. It gets the folder of the judged workspace, and returns
            a number or a dict as `CommandJudge`'s JSON.
        folder: Folder in which the module is looked for first, relative to the task file; by
            default the folder of the task file. Then it is found as rolltap's Python finds modules.
    """

    kind: Literal["python"] = "python"
    function: str = Field(pattern=r"^[\w.]+:[\w.]+$")
    folder: Path | None = Field(default=None, exclude=True)


class LLMJudge(_Judge):
    """A model that reads the changes and a rubric, at an OpenAI-compatible endpoint.

    Attributes:
        rubric: Text by which the model judges.
        url: Base URL, for instance `https://api.openai.com/v1`. The engine of the policy is
            refused, unless `policy_judges_itself` is true.
        model: Name of the model there.
        key_env: Name of the environment variable with the key.
        policy_judges_itself: True accepts the engine of the policy.
    """

    kind: Literal["llm"] = "llm"
    rubric: Text = Field(min_length=1)
    url: str
    model: str
    key_env: str | None = None
    policy_judges_itself: bool = False


class WeightedJudge(BaseModel):
    """One of several judges.

    Attributes:
        name: Its name among the parts.
        weight: Its weight in the mean.
        judge: Its description.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1)
    weight: Weight = 1.0
    judge: "Judge"


class SeveralJudges(BaseModel):
    """Several judges: the reward is the weighted mean of theirs.

    When one cannot judge, the session is unjudged.

    Attributes:
        judges: The judges, each with a name and a weight.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["several"] = "several"
    judges: list[WeightedJudge] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if len({one.name for one in self.judges}) < len(self.judges):
            raise ValueError("two of the judges have the same name")
        return self


Judge = Annotated[
    CommandJudge | PytestJudge | PythonJudge | LLMJudge | SeveralJudges,
    Field(discriminator="kind"),
]
_JUDGES = get_args(get_args(Judge)[0])
JUDGE_KINDS: tuple[str, ...] = tuple(kind.model_fields["kind"].default for kind in _JUDGES)
"""Names of the judges: values of `kind`. A new kind is added wherever another kind is named."""
WeightedJudge.model_rebuild()


_ISOLATED = {"memory_gib": 8.0, "processes": 1024, "disk_gib": 20.0}


class Limits(BaseModel):
    """Limits of all programs of a session together. None is no limit in the runtime `process`.

    The other runtimes, which isolate, have a limit of 8 GiB of memory, 1024 processes and 20 GiB on
    disk where a task sets none; cores stay without a limit. In `harbor` memory, processes and cores
    are as its environment has them where a task sets none.

    Attributes:
        cpus: Number of processor cores.
        memory_gib: Memory in GiB.
        processes: Number of processes and threads.
        disk_gib: Size in GiB of what the session writes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    cpus: Cores | None = None
    memory_gib: Gibibytes | None = None
    processes: Processes | None = None
    disk_gib: Gibibytes | None = None

    def of_isolated(self) -> Self:
        """Return these limits as a runtime that isolates holds them: its own in place of those that
        are None."""
        missing = {}
        for name, value in _ISOLATED.items():
            if getattr(self, name) is None:
                missing[name] = value
        return self.model_copy(update=missing)


class Build(BaseModel):
    """An image that is built before the first session.

    Attributes:
        folder: Folder with a `Dockerfile`. The build sees nothing else of this machine's files.
        timeout: Seconds after which the build is stopped.
        why: Line of the Dockerfile that only a build can carry out, for messages.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: Path
    timeout: Seconds = 600.0
    why: str = ""


class Task(BaseModel):
    """An instruction, the workspace to start from, and the judge of the result.

    A task file is JSON Lines with these fields as keys. Paths in it are relative to the file. The
    constructor takes texts as paths too, and raises `InputError`, which names each wrong field.

    Attributes:
        id: Name of the task in the dataset: letters, digits, dot, dash and underscore.
        instruction: Prompt for the harness.
        workspace: Folder of which every session gets a copy. By default an empty folder, or the
            folder `workdir` of the image. A git checkout in it has the history up to its commit,
            and nothing else of its repository.
        commit: Id of the commit at which the checkout or bare repository `workspace` starts. By
            default the files as they are checked out, with their changes. The files of a workspace
            in the image stay, and its history ends at the commit.
        files: Path in the workspace -> file or folder of this machine that is laid there, over what
            `workspace` has.
        image: Container image in which the session runs, or the absolute path of a root folder. The
            runtime must have images then, unless `image_optional` is true.
        image_optional: True if a runtime without images may take this machine's system folders
            instead. The workspace never starts with the image's `workdir` then.
        build: Image to be built, in place of `image`. It needs the setting `build`, and the runtime
            `container` or `harbor`.
        workdir: Absolute path of the workspace in a runtime with files of its own.
        timeout: Seconds after which the harness is stopped. By default the rollout's `timeout`.
        limits: Limits of the session's box.
        env: Further environment variables of the harness and of the judge.
        allow: Hosts that the session may reach, through the recorder, in place of the hosts of the
            option `rolltap_allow`: names or patterns, such as `pypi.org`, `*.pythonhosted.org` or
            `pypi.org:8443`. An empty list is none. Model calls need no host.
        needs_network: Place where the judge asks for a network although it has no `allow`, as a
            phrase. Only the runtime `process` runs such a task; no runtime runs it if its judge has
            `mounts` or `writable`.
        judge: Description of the judge.
        evaluate: Short form of a `CommandJudge` with this command. A task has either `judge` or
            `evaluate`.
        solution: Solution of the task, for `rolltap tasks check`: a folder with `solve.sh`, which
            is run in the workspace; another folder, which is laid over the workspace; or a file
            with a unified diff. No session sees it, and it does not count in the digest.
        gold_patch: A unified diff that solves the task, in place of `solution`. It is in no dump of
            the task.
        source: Origin of the task, for messages: a folder, or a file and its row.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: PlainId = Field(min_length=1, max_length=200)
    instruction: Text = Field(min_length=1)
    workspace: Path | None = None
    commit: str | None = Field(default=None, pattern=r"^[0-9a-f]{7,64}$")
    files: dict[PathInside, Path] = {}
    image: str | None = Field(default=None, min_length=1)
    image_optional: bool = False
    build: Build | None = None
    workdir: BoxPath = "/workspace"
    timeout: Seconds | None = None
    limits: Limits = Limits()
    env: Variables = {}
    allow: Hosts | None = None
    needs_network: str | None = None
    evaluate: Command = []
    judge: Judge | None = None
    solution: Path | None = None
    gold_patch: str = Field(default="", exclude=True, repr=False)
    source: str = ""

    def __init__(self, /, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            where = fields.get("source") or f"task {fields.get('id', '')!r}"
            raise InputError(f"{where}: {describe(error, {'judge': JUDGE_KINDS})}") from error

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.evaluate and self.judge is None:
            raise ValueError("'evaluate' is missing: give the judge's command, or a table 'judge'")
        if self.evaluate and self.judge is not None:
            raise ValueError(
                "'evaluate' and 'judge' are both given: remove 'evaluate', the short form",
            )
        if self.image is not None and self.build is not None:
            raise ValueError("'image' and 'build' are both given: remove one")
        is_somewhere = self.workspace or self.image or self.build
        if self.commit is not None and not is_somewhere:
            without = f"'commit' is {self.commit!r} without a checkout"
            raise ValueError(f"{without}: give 'workspace' or an 'image' with one")
        return self

    @property
    def effective_judge(self) -> Judge:
        """The judge, also of a task with the short form."""
        return self.judge if self.judge is not None else CommandJudge(command=self.evaluate)

    def digest(self) -> str:
        """Return the SHA-256 of the task, in hexadecimal: the same task elsewhere has the same.

        Of each path that the task names the content counts instead, of `workspace` with a `commit`
        the commit, and of an image its name. `source`, the solution and the code of a `PythonJudge`
        do not count. Raises `InputError` for a path.
        """
        without = {"source", "evaluate", "judge", "build", "solution"}
        if self.commit:
            without.add("workspace")
        if self.allow is None:
            without.add("allow")
        fields = self.model_dump(exclude=without)
        if self.build is not None:
            fields["build"] = self.build.folder
        fields["judge"] = self.effective_judge.model_dump()
        text = json.dumps(fields, sort_keys=True, default=lambda value: content_digest(Path(value)))
        return hashlib.sha256(text.encode()).hexdigest()
