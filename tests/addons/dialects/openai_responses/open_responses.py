"""The shapes of the specification of Open Responses (openresponses.org), of 24 April 2026. More
fields are allowed."""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    TypeAdapter,
)

Number = StrictInt | StrictFloat
Effort = Literal["none", "low", "medium", "high", "xhigh"]
Status = Literal["in_progress", "completed", "incomplete"]
Verbosity = Literal["low", "medium", "high"]
Choice = Literal["none", "auto", "required"]


class Model(BaseModel):
    model_config = ConfigDict(extra="allow")


class Part(Model):
    type: Literal["input_text", "text", "summary_text", "reasoning_text"]
    text: StrictStr


class OutputText(Model):
    type: Literal["output_text"]
    text: StrictStr
    annotations: list[Any]
    logprobs: list[Any] = []


AnyPart = Annotated[Part | OutputText, Field(discriminator="type")]


class Message(Model):
    type: Literal["message"]
    id: StrictStr
    status: Status
    role: Literal["user", "assistant", "system", "developer"]
    content: list[AnyPart]
    phase: Literal["commentary", "final_answer"] = "final_answer"


class FunctionCall(Model):
    type: Literal["function_call"]
    id: StrictStr
    call_id: StrictStr
    name: StrictStr
    arguments: StrictStr
    status: Status


class ReasoningItem(Model):
    type: Literal["reasoning"]
    id: StrictStr
    content: list[AnyPart] = []
    summary: list[AnyPart]
    encrypted_content: StrictStr = ""


class Compaction(Model):
    type: Literal["compaction"]
    id: StrictStr
    encrypted_content: StrictStr


Item = Annotated[Message | FunctionCall | ReasoningItem | Compaction, Field(discriminator="type")]


class Cached(Model):
    cached_tokens: StrictInt


class Reasoned(Model):
    reasoning_tokens: StrictInt


class Usage(Model):
    input_tokens: StrictInt
    output_tokens: StrictInt
    total_tokens: StrictInt
    input_tokens_details: Cached
    output_tokens_details: Reasoned


class Failure(Model):
    code: StrictStr
    message: StrictStr


class Why(Model):
    reason: StrictStr


class FunctionTool(Model):
    type: Literal["function"]
    name: StrictStr
    description: StrictStr | None
    parameters: dict[str, Any] | None
    strict: StrictBool | None


class FunctionChoice(Model):
    type: Literal["function"]
    name: StrictStr


class AllowedTools(Model):
    type: Literal["allowed_tools"]
    tools: list[FunctionChoice]
    mode: Choice


class Format(Model):
    type: Literal["text", "json_object", "json_schema"]


class Text(Model):
    format: Format
    verbosity: Verbosity = "medium"


class Reasoning(Model):
    effort: Effort | None
    summary: Literal["concise", "detailed", "auto"] | None


class Response(Model):
    id: StrictStr
    object: Literal["response"]
    created_at: StrictInt
    completed_at: StrictInt | None
    status: StrictStr
    incomplete_details: Why | None
    model: StrictStr
    previous_response_id: StrictStr | None
    instructions: StrictStr | None
    output: list[Item]
    error: Failure | None
    tools: list[FunctionTool]
    tool_choice: FunctionChoice | Choice | AllowedTools
    truncation: Literal["auto", "disabled"]
    parallel_tool_calls: StrictBool
    text: Text
    top_p: Number
    presence_penalty: Number
    frequency_penalty: Number
    top_logprobs: StrictInt
    temperature: Number
    reasoning: Reasoning | None
    usage: Usage | None
    max_output_tokens: StrictInt | None
    max_tool_calls: StrictInt | None
    store: StrictBool
    background: StrictBool
    service_tier: StrictStr
    metadata: Any
    safety_identifier: StrictStr | None
    prompt_cache_key: StrictStr | None


class Compacted(Model):
    id: StrictStr
    object: Literal["response.compaction"]
    output: list[Item]
    created_at: StrictInt
    usage: Usage


class Event(Model):
    sequence_number: StrictInt


class ResponseEvent(Event):
    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete"
    ]
    response: Response


class OfItem(Event):
    output_index: StrictInt


class ItemEvent(OfItem):
    type: Literal["response.output_item.added", "response.output_item.done"]
    item: Item


class Inner(OfItem):
    item_id: StrictStr


class PartEvent(Inner):
    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: StrictInt
    part: AnyPart


class SummaryEvent(Inner):
    type: Literal["response.reasoning_summary_part.added", "response.reasoning_summary_part.done"]
    summary_index: StrictInt
    part: AnyPart


class Delta(Inner):
    type: Literal["response.function_call_arguments.delta"]
    delta: StrictStr


class TextDelta(Inner):
    type: Literal["response.output_text.delta"]
    content_index: StrictInt
    delta: StrictStr


class SummaryDelta(Inner):
    type: Literal["response.reasoning_summary_text.delta"]
    summary_index: StrictInt
    delta: StrictStr


class ArgumentsDone(Inner):
    type: Literal["response.function_call_arguments.done"]
    arguments: StrictStr


class TextDone(Inner):
    type: Literal["response.output_text.done", "response.reasoning_summary_text.done"]
    text: StrictStr


AnyEvent = TypeAdapter(
    Annotated[
        ResponseEvent
        | ItemEvent
        | PartEvent
        | SummaryEvent
        | Delta
        | TextDelta
        | SummaryDelta
        | ArgumentsDone
        | TextDone,
        Field(discriminator="type"),
    ]
)
