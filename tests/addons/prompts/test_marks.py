"""Work on a reply is linear in what was sampled, for every family: a policy that loops stops nobody
else."""

import re
from itertools import pairwise

import pytest

from rolltap.addons.dialects.call import ModelCall
from rolltap.addons.prompts import families as module
from rolltap.addons.prompts.families import Family, families
from rolltap.addons.prompts.probes import TOOLS
from rolltap.addons.prompts.reply import LONGEST_MARK, ReplyParser

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
    "kimi": (
        "<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>",
        '{"a":',
        "<|tool_call_end|>",
    ),
    "minimax": ('<invoke name="look">', '<parameter name="string">', "</invoke>"),
    "laguna": ("<tool_call>look", "<arg_key>string</arg_key><arg_value>", "</tool_call>"),
    "hy": (
        "<tool_call:opensource>look<tool_sep:opensource>",
        "<arg_key:opensource>a</arg_key:opensource><arg_value:opensource>",
        "</tool_call:opensource>",
    ),
    "inkling": ("<|content_invoke_tool_json|>", '{"name":', "<|end_message|>"),
}
"""Family -> the mark that opens a call, text in which a policy may loop in it, and the mark that
closes it."""


def calls_that_open(opening, inside, closing, size):
    return opening * (size // len(opening))


def calls_that_end(opening, inside, closing, size):
    return (opening + inside + closing) * (size // 64)


def a_call_that_does_not_end(opening, inside, closing, size):
    return opening + inside * (size // len(inside))


def a_long_call(opening, inside, closing, size):
    return opening + inside * (size // len(inside)) + closing


def a_long_call_of_lines(opening, inside, closing, size):
    return opening + (inside + "\n") * (size // 64) + closing


def white_space(opening, inside, closing, size):
    return opening + "\n" * size + closing + "\n" * size


def words(opening, inside, closing, size):
    return opening[:-1] + "x" * size + " <" * size


LOOPS = [
    calls_that_open,
    calls_that_end,
    a_call_that_does_not_end,
    a_long_call,
    a_long_call_of_lines,
    white_space,
    words,
]


OWN = {
    "start_anchor": "<reply>",
    "fields": {
        "content": {"close": "<end>"},
        "tool_calls": {
            "open_pattern": "<call.*?>",
            "close_pattern": "</call.*?>",
            "content": "json",
        },
    },
}
"""A template of a tokenizer, whose marks have no bound."""


class Counting:
    """A pattern that counts the characters it may look at, in the two ways in which it is used."""

    looked_at = 0

    def __init__(self, pattern):
        self.pattern = pattern

    def search(self, text, begin=0, **options):
        Counting.looked_at += len(text) - begin
        return self.pattern.search(text, begin, **options)

    def match(self, text, begin):
        """A match of arguments looks at itself, and one that fails at all of the rest."""
        found = self.pattern.match(text, begin)
        Counting.looked_at += (len(text) if found is None else found.end()) - begin
        return found

    def __getattr__(self, name):
        raise AssertionError(f"{name} is not counted")


@pytest.fixture
def counted(monkeypatch):
    """Return a function from the name of a family, a text and a length to the characters that its
    patterns look at."""
    read = {"own": Family("own", OWN), **families.__wrapped__()}
    for family in read.values():
        for field in family.template.fields.values():
            field.open_re = field.open_re and Counting(field.open_re)
            field.close_re = field.close_re and Counting(field.close_re)
    tag_patterns = {
        family._calls.get("content_args", {}).get("tag_pattern") for family in read.values()
    } - {None}

    def compiled(pattern, flags=0):
        found = re.compile(pattern, flags)
        return Counting(found) if any(tag in pattern for tag in tag_patterns) else found

    monkeypatch.setattr(
        module, "re", type("Re", (), {**vars(re), "compile": staticmethod(compiled)})
    )

    def count(name, text, piece):
        Counting.looked_at = 0
        parser = ReplyParser(read[name], "", ModelCall("m", [], TOOLS))
        for begin, end in pairwise([*range(0, len(text), piece), len(text)]):
            parser.feed(text[begin:end])
        parser.finish()
        return Counting.looked_at

    return count


def test_each_family_has_its_loops():
    assert CALLS.keys() == families().keys()


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", CALLS)
def test_four_times_the_text_is_looked_at_about_four_times(counted, name, loop):
    """Quadratic work would be sixteen times as much."""
    small, large = (loop(*CALLS[name], size) for size in (10_000, 40_000))
    for piece in (32, len(large)):
        assert counted(name, large, piece) < 6 * counted(name, small, piece)


def test_a_mark_without_a_bound_is_none_after_a_while(counted):
    for opening in ("<call", "<call>" + "</call"):
        small, large = (opening + "x" * size for size in (10_000, 40_000))
        assert counted("own", large, 32) < 6 * counted("own", small, 32)


def test_marks_are_shorter_than_the_text_that_is_held_back():
    """Each repetition in their patterns has a bound, so that a search is linear in the text."""
    for family in families().values():
        for field in family.template.fields.values():
            for pattern in filter(None, (field.open_re, field.close_re)):
                _, longest = re._parser.parse(pattern.pattern).getwidth()
                assert longest < LONGEST_MARK
