"""Work on a reply is linear in what was sampled, for every family: a policy that loops stops nobody else."""

import time

import pytest

from rolltap.addons.dialects.call import ModelCall
from rolltap.addons.prompts.choice import TOOLS
from rolltap.addons.prompts.families import families
from rolltap.addons.prompts.reply import ReplyParser

CALLS = {
    "hermes": ("<tool_call>", '{"a":', "</tool_call>"),
    "qwen-xml": ("<tool_call>\n<function=look>", "<parameter=string>", "</function></tool_call>"),
    "glm": ("<tool_call>look", "<arg_key>string</arg_key><arg_value>", "</tool_call>"),
    "llama": ('{"name": ', "[", "<|eot_id|>"),
    "harmony": (" to=functions.look<|message|>", '{"a":', "<|call|>"),
    "gemma": ("<|tool_call>call:look", '{a:<|"|>', "<tool_call|>"),
    "lfm": ("<|tool_call_start|>", "[look(string='", "<|tool_call_end|>"),
    "muse": ('<atem:invoke name="look">', '<atem:parameter name="string">', "</atem:invoke>"),
    "deepseek": (
        "<\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>look\n```json\n",
        "```",
        "\n```<\uff5ctool\u2581call\u2581end\uff5c>",
    ),
    "deepseek-dsml": (
        '<\uff5cDSML\uff5cinvoke name="look">',
        '<\uff5cDSML\uff5cparameter name="string" string="true">',
        "</\uff5cDSML\uff5cinvoke>",
    ),
    "kimi": ("<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>", '{"a":', "<|tool_call_end|>"),
    "minimax": ('<invoke name="look">', '<parameter name="string">', "</invoke>"),
    "laguna": ("<tool_call>look", "<arg_key>string</arg_key><arg_value>", "</tool_call>"),
    "hy": (
        "<tool_call:opensource>look<tool_sep:opensource>",
        "<arg_key:opensource>a</arg_key:opensource><arg_value:opensource>",
        "</tool_call:opensource>",
    ),
    "inkling": ("<|content_invoke_tool_json|>", '{"name":', "<|end_message|>"),
}
"""Family -> the mark that opens a call, text in which a policy may loop in it, and the mark that closes it."""
LOOPS = {
    "calls that open": lambda opening, inside, closing, size: opening * (size // len(opening)),
    "calls that end": lambda opening, inside, closing, size: (opening + inside + closing) * (size // 64),
    "a call that does not end": lambda opening, inside, closing, size: opening + inside * (size // len(inside)),
    "a long call": lambda opening, inside, closing, size: opening + inside * (size // len(inside)) + closing,
    "a long call of lines": lambda opening, inside, closing, size: opening + (inside + "\n") * (size // 64) + closing,
    "white space": lambda opening, inside, closing, size: opening + "\n" * size + closing + "\n" * size,
    "words": lambda opening, inside, closing, size: opening[:-1] + "x" * size + " <" * size,
}


def seconds(family, text, piece):
    """Return the CPU time that reading a text in pieces takes, of the best of three."""
    best = float("inf")
    for _ in range(3):
        started = time.process_time()
        parser = ReplyParser(family, "", ModelCall("m", [], TOOLS))
        for begin in range(0, len(text), piece):
            parser.feed(text[begin : begin + piece])
        parser.finish()
        best = min(best, time.process_time() - started)
    return best


def test_each_family_has_its_loops():
    assert CALLS.keys() == families().keys()


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", CALLS)
def test_four_times_the_text_takes_about_four_times_the_work(name, loop):
    """Quadratic work would be sixteen times as much."""
    small, large = (LOOPS[loop](*CALLS[name], size) for size in (10_000, 40_000))
    for piece in (32, len(large)):
        assert seconds(families()[name], large, piece) < 10 * seconds(families()[name], small, piece)
