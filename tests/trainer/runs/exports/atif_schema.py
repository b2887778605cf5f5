"""ATIF-v1.7 as pydantic models, copied from harbor 0.25.0 (`harbor.models.trajectories`), which
needs Python 3.12. Of the rules only those are here that a text-only trajectory can break, of the
fields those that are written."""

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid")
    extra: dict[str, Any] | None = None


class Reference(Model):
    trajectory_id: str


class Result(Model):
    source_call_id: str | None = None
    content: str | None = None
    subagent_trajectory_ref: list[Reference] | None = None


class Observation(BaseModel):
    model_config = ConfigDict(extra="forbid")
    results: list[Result]


class ToolCall(Model):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]


class Metrics(Model):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None


class FinalMetrics(Model):
    total_prompt_tokens: int | None = None
    total_completion_tokens: int | None = None
    total_cached_tokens: int | None = None
    total_steps: Annotated[int, Field(ge=0)] | None = None


class Agent(Model):
    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[dict[str, Any]] | None = None


class Step(Model):
    step_id: Annotated[int, Field(ge=1)]
    timestamp: str | None = None
    source: Literal["system", "user", "agent"]
    message: str
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    observation: Observation | None = None
    metrics: Metrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def rules(self) -> Self:
        if self.timestamp is not None:
            datetime.fromisoformat(self.timestamp)
        if self.source != "agent":
            assert not self.model_fields_set & {"reasoning_content", "tool_calls", "metrics"}
        asked = {call.tool_call_id for call in self.tool_calls or []}
        answered = (
            {result.source_call_id for result in self.observation.results}
            if self.observation
            else set()
        )
        assert answered - {None} <= asked
        return self


class Trajectory(Model):
    schema_version: Literal["ATIF-v1.7"]
    session_id: str | None = None
    trajectory_id: str | None = None
    agent: Agent
    steps: Annotated[list[Step], Field(min_length=1)]
    final_metrics: FinalMetrics | None = None
    subagent_trajectories: list["Trajectory"] | None = None

    @model_validator(mode="after")
    def rules(self) -> Self:
        assert [step.step_id for step in self.steps] == list(range(1, len(self.steps) + 1))
        embedded = [trajectory.trajectory_id for trajectory in self.subagent_trajectories or []]
        assert None not in embedded
        assert len(set(embedded)) == len(embedded)
        return self
