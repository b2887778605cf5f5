"""Output of `rolltap inspect`, and calls for it."""

from click.testing import CliRunner

from rolltap.trainer.cli.runs import inspect_command
from tests.factories import make_call


def call(number, call_id, prompt, sampled, *, parent=None, session="first", **fields):
    """Return a call whose prompt is the tokens of its parent followed by `prompt`."""
    defaults = {
        "call_id": call_id,
        "session_id": session,
        "logprobs": [-0.5] * len(sampled),
        "finish_reason": "stop",
        "version": "default",
    }
    return make_call(number, prompt, sampled, after=parent, **{**defaults, **fields})


def printed(*arguments, columns=300):
    runner = CliRunner(env={"COLUMNS": str(columns)})
    ended = runner.invoke(inspect_command, list(map(str, arguments)), catch_exceptions=False)
    assert ended.exit_code == 0
    return ended.output
