"""A vLLM's account of its own code, without an engine. Its Python runs this file, without rolltap.

The standard input is JSON: command lines of `vllm serve`. The standard output is JSON too: the
messages of vLLM's parser for those that it refuses, the routes with their parameters and the code
that answers them, the fields of answers, the code of its metrics, and an event of a generation.
"""

import contextlib
import inspect
import io
import json
import sys

from vllm.entrypoints.cli import serve
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.openai.completion.protocol import CompletionResponseChoice
from vllm.entrypoints.scale_out.token_in_token_out import protocol
from vllm.entrypoints.serve.engine.protocol import ModelCard, PromptTokenUsageInfo, UsageInfo
from vllm.entrypoints.serve.tokenize.protocol import TokenizeResponse
from vllm.outputs import WeightVersionSpan
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.metrics import loggers

parser = FlexibleArgumentParser()
subparsers = parser.add_subparsers(dest="subparser")
for command in serve.cmd_init():
    command.subparser_init(subparsers)
refused = []
for line in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            arguments = parser.parse_args(line)
        except SystemExit:
            refused.append(said.getvalue())

app = build_app(arguments, supported_tasks=("generate",))
parameters = {}
for path, methods in app.openapi()["paths"].items():
    named = [each["name"] for method in methods.values() for each in method.get("parameters", [])]
    parameters[path] = named
code = {}
for route in app.routes:
    if hasattr(route, "endpoint"):
        code[route.path] = inspect.getsource(inspect.unwrap(route.endpoint))

token = protocol.GenerateLogProbsContent(token_id=5, logprob=-0.5, rank=1, top_logprobs=[])
choice = protocol.GenerateTokensStreamChoice(
    index=0,
    token_ids=[5],
    logprobs=protocol.GenerateLogProbs(content=[token]),
    finish_reason="stop",
    stop_reason="END",
    weight_versions=[WeightVersionSpan("default", 0, 1)],
    routed_experts="AAAA",
)
usage = UsageInfo(prompt_tokens_details=PromptTokenUsageInfo(cached_tokens=3))
event = protocol.GenerateTokensStreamResponse(request_id="r", choices=[choice], usage=usage)
answers = (CompletionResponseChoice, ModelCard, TokenizeResponse)
says = {
    "refused": refused,
    "parameters": parameters,
    "code": code,
    "fields": {answer.__name__: list(answer.model_fields) for answer in answers},
    "metrics": inspect.getsource(loggers),
    "event": event.model_dump(mode="json"),
}
print(json.dumps(says))
