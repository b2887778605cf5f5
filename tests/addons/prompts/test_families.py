"""Every chat template with tools that TRL ships is read and continued, or refused by name.

Each is put into a folder of its own, with a tokenizer that has its family's tokens: as it is, with
a comment, with another sentence, and as its training variant. `python -m
tests.addons.prompts.test_families` prints the table of recipes/site/pages/models.md.
"""

import json
import re
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rolltap.addons.dialects.call import ModelCall
from rolltap.addons.dialects.dialect import name_results
from rolltap.addons.dialects.tools import as_object, function_tool
from rolltap.addons.errors import InputError
from rolltap.addons.prompts.choice import find_family, written_turns
from rolltap.addons.prompts.families import families
from rolltap.addons.prompts.probes import TOOLS, TURNS
from rolltap.addons.prompts.rendering import Rendering
from rolltap.addons.prompts.reply import ReplyParser, read_text
from tests.addons.conftest import MARKUP
from tests.addons.harness import user
from tests.addons.prompts.talks import continued as continue_call
from tests.deep import examples

TRL = find_spec("trl")
if TRL is None or TRL.origin is None:
    pytest.skip("TRL is not installed: its chat templates are the cases", allow_module_level=True)
ROOT = Path(__file__).resolve().parents[3]
QWEN = ROOT / "tests/models/qwen3-4b"
TEMPLATES = Path(TRL.origin).parent / "chat_templates"
WITH_TOOLS = sorted(
    path.stem
    for path in TEMPLATES.glob("*.jinja")
    if re.search(r"\btools\b", path.read_text()) and "_training" not in path.name
)
WITHOUT_CALLS = {"lfm2"}
"""Templates that write no tool calls, so that nothing says how the model does."""
END_OF_TEXT = "<|endoftext|>"
ENDS = re.compile(r"<\|im_end\|>|<\|eot_id\|>|<turn\|>|<\|eot\|>|<\|return\|>|<\|user\|>")
_SPECIAL = re.compile(r"<\|[a-z_]+\|?>|<[a-z_]+\|>")
ACROSS = [".\n\n", ">\n"]
"""Tokens across the borders of what templates write."""


def variants(stem):
    """Return the template's text in each variant."""
    text = (TEMPLATES / f"{stem}.jinja").read_text()
    found = {
        "as it is": text,
        "with a comment": "{#- Copied by a mirror. #}" + text,
        "with another sentence": re.sub(r"(?<=[a-z]) (you|the|these) (?=[a-z])", r" all \1 ", text),
    }
    training = TEMPLATES / f"{stem}_training.jinja"
    if training.is_file():
        found["for training"] = training.read_text()
    return found


@cache
def tokens():
    """Return the quickstart's tokenizer with tokens across borders, as JSON."""
    backend = Tokenizer.from_file(str(QWEN / "tokenizer.json"))
    backend.add_tokens([AddedToken(text, normalized=False) for text in ACROSS])
    return backend.to_str()


def save(folder, text):
    """Save a tokenizer with the tokens that a template writes. Return the rendering by defaults."""
    backend = Tokenizer.from_str(tokens())
    special = sorted({*_SPECIAL.findall(text), END_OF_TEXT, "<|return|>", "<|call|>", "<eos>"})
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False) for token in MARKUP])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    end = ENDS.search(text)
    tokenizer.eos_token = END_OF_TEXT if end is None or end.group() == "<|user|>" else end.group()
    tokenizer.bos_token = tokenizer.unk_token = END_OF_TEXT
    tokenizer.chat_template = text
    tokenizer.save_pretrained(folder)
    return Rendering(str(folder))


@dataclass
class Found:
    """How a rendering does with the turns of a template."""

    prompts: str
    """The renderer."""
    replies: str
    """The family, or the renderer."""
    turns: dict[str, str]
    """Turn -> yes, the first thing that is wrong, or - when the template does not write it."""

    @property
    def works(self):
        return {*self.turns.values()} <= {"yes", "-"} and self.turns["one call"] == "yes"


def examine(rendering):
    """Return how a rendering reads, streams and continues the turns that the model's template
    writes."""
    turns = dict.fromkeys(TURNS, "-")
    for name, (prompt_end, text) in written_turns(rendering._write).items():
        if name in rendering.read_turns():  # the others were written in part
            turns[name] = one(rendering, TURNS[name], prompt_end, text)
    return Found(rendering.name, rendering.family.name, turns)


def functions(message):
    """Return the names and arguments of the tool calls of a message."""
    found = []
    for call in message.get("tool_calls", []):
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            arguments = as_object(arguments)
        found.append((call["function"]["name"], arguments))
    return found


def one(rendering, turn, prompt_end, text):
    calls = functions(turn)
    reasoning = turn.get("reasoning_content", "")
    ids = sampled(rendering, text, NEXT[bool(calls)])
    prompt = rendering.tokenizer.encode(prompt_end)
    reply = rendering.read(prompt, ids, TOOLS)[0]
    got = functions(reply.to_message())
    if got != calls:
        return f"reads the calls {got}"
    if (reply.reasoning, reply.content) != (reasoning, turn["content"]):
        return f"reads {reply.reasoning!r} and {reply.content!r}"
    growing = rendering.sampled_reply(prompt, ModelCall("m", [user("Look.")], TOOLS))
    new = [growing.feed([token_id]) for token_id in ids]
    whole, rest = growing.finish()
    streamed = ["".join(texts) for texts in zip(*new, rest, strict=True)]
    if streamed != [whole.reasoning, whole.content] or whole.content != reply.content:
        return f"streams {streamed}"
    up_to = rendering.tokenizer.decode(ids[: growing.reasoning_tokens])
    if not up_to.rstrip().endswith(reasoning):
        return f"counts the tokens of {up_to!r} as reasoning"
    results = []
    for call in turn.get("tool_calls", []):
        results.append({"role": "tool", "content": "Seen.", "tool_call_id": call["id"]})
    conversation = name_results([user("Look."), turn, *(results or [user("Go on.")])])
    continued = continue_call(rendering, prompt, ids, conversation[2:], TOOLS)
    if continued is None:
        return f"is not continued: {rendering.refusal}"
    whole_text = rendering.tokenizer.apply_chat_template(
        conversation, tools=TOOLS, add_generation_prompt=True, tokenize=False
    )
    extension = rendering.tokenizer.decode(continued[len(prompt) + len(ids) :])
    if not whole_text.endswith(extension):
        return f"continues with {extension!r}"
    return "yes"


NEXT = {True: "<|observation|>", False: "<|user|>"}
"""The token that ends a turn of GLM: it begins the next one."""


def sampled(rendering, text, following):
    """Return the ids of a turn up to the token that ends it, as a model would sample them."""
    ids = rendering.tokenizer.encode(text)
    for index, token_id in enumerate(ids):
        if token_id in rendering.stop_token_ids:
            return ids[: index + 1]
    return ids + rendering.tokenizer.encode(following)


HERMES, XML = families()["hermes"], families()["qwen-xml"]
GOOD = '<tool_call>\n{"name": "look", "arguments": {"string": "x"}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=look>\n<parameter=string>\n{}\n</parameter>\n</function>\n</tool_call>"
)


LOOPS = [
    "<tool_call>\n",
    "<tool_call>\n<function=look>\n<parameter=string>\n",
    "<parameter=string>",
    "</parameter>\n</function>\n</tool_call>",
    "<tool_call>look<arg_key>string</arg_key><arg_value>",
    "</arg_value></tool_call>",
    '<|tool_call>call:look{a:<|"|>',
    '<|"|><tool_call|>',
    "<|tool_call_start|>[look(string='",
    '<atem:invoke name="look"><atem:parameter name="string">',
    "<|channel|>analysis<|message|>",
    " to=functions.look<|message|>{",
    "<|call|>",
    "<|message_model|><|content_text|>",
    '<minimax:tool_call><invoke name="look"><parameter name="string">',
    '<\uff5cDSML\uff5cinvoke name="look"><\uff5cDSML\uff5cparameter name="string" string="true">',
    "<\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>look\n```json\n",
    "<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>",
    "\n" * 64,
    "x" * 300,
    "[" * 64,
]
"""Texts in which a policy may loop."""


def called(reply):
    """Return the names and arguments of a reply's tool calls."""
    return [(call.name, as_object(call.arguments)) for call in reply.tool_calls]


TYPES = """
{"type": "string"}  3  "3"
{"type": "integer"}  3  3
{"type": "boolean"}  True  true
{"type": ["string", "null"]}  null  null
{"anyOf": [{"type": "integer"}, {"type": "null"}]}  None  null
{"type": "integer"}  three  "three"
{"type": "object"}  {"a": [1]}  {"a": [1]}
{}  3  3
{"enum": [1, 2]}  1  1
{"$ref": "#/$defs/a"}  {"line": 3}  {"line": 3}
{"enum": ["a"]}  a  "a"
"""
"""Schemas of an argument, texts in tags, and the arguments that they are."""


class TestRead:
    @pytest.mark.parametrize(
        "broken",
        [
            '<tool_call>\n{"name": "look", "arguments"}\n</tool_call>',
            '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>',
            '<tool_call>\n["look"]\n</tool_call>',
            '<tool_call>\n{"name": "look", "arguments": {"string": "x"}}',
        ],
        ids=["no JSON", "no name", "no object", "not ended"],
    )
    def test_a_call_that_cannot_be_read_is_text_as_it_was_sampled(self, broken):
        reply = read_text(HERMES, "", f"<think>\nI look.\n</think>\n\nSo. {GOOD} {broken}", TOOLS)
        assert (reply.reasoning, called(reply)) == ("I look.", [("look", {"string": "x"})])
        assert reply.content == f"So. {broken}".strip()

    def test_reasoning_that_the_prompt_has_opened_is_none_of_the_replys_text(self):
        reply = read_text(
            XML, "<|im_start|>assistant\n<think>\n", "I look.\n</think>\n\nHi.<|im_end|>", []
        )
        assert (reply.reasoning, reply.content) == ("I look.", "Hi.")

    @pytest.mark.parametrize("row", TYPES.strip().splitlines())
    def test_plain_arguments_get_the_types_of_their_schema(self, row):
        schema, text, value = row.split("  ")
        properties = {"string": json.loads(schema)}
        tools = [function_tool("look", "", {"type": "object", "properties": properties})]
        reply = read_text(XML, "", XML_CALL.format(text), tools)
        assert called(reply) == [("look", {"string": json.loads(value)})]

    @pytest.mark.parametrize(
        ("body", "arguments"),
        [
            ("<parameter=string>x</parameter>", {"string": "x"}),
            ("<parameter=a>\n</parameter>\n<parameter=b>\nx\n</parameter>", {"a": "", "b": "x"}),
            ("<parameter=a>\n\n x\n\n</parameter>", {"a": "\n x\n"}),
            ('{"string": "x"}', None),
            ("<parameter=string>\nx", None),
        ],
        ids=["inline", "an empty value", "lines around a value", "JSON", "not ended"],
    )
    def test_all_of_a_call_in_tags_is_arguments_or_it_is_text(self, body, arguments):
        text = f"<tool_call>\n<function=other>\n{body}\n</function>\n</tool_call>"
        reply = read_text(XML, "", text, TOOLS)
        assert called(reply) == ([] if arguments is None else [("other", arguments)])
        assert reply.content == (text if arguments is None else "")

    @pytest.mark.parametrize(
        ("name", "text", "content"),
        [
            ("llama", '{"name": "Alice", "age": 5}', '{"name": "Alice", "age": 5}'),
            ("harmony", "Hello there.", "Hello there."),
            ("muse", "Hello there.", "Hello there."),
            ("harmony", '<|channel|>final <|constrain|>json<|message|>{"a": 1}', '{"a": 1}'),
            ("hermes", "Use the <think> tag.", "Use the <think> tag."),
            ("lfm", f"<|tool_call_start|>[look(a={'-' * 7000}1)]<|tool_call_end|>", None),
        ],
    )
    def test_what_only_looks_like_a_part_of_a_reply_is_text(self, name, text, content):
        reply = read_text(families()[name], "", text, TOOLS)
        assert reply.content == (text if content is None else content)
        assert (reply.reasoning, reply.tool_calls) == ("", [])

    @pytest.mark.parametrize(
        ("prompt_end", "text"),
        [
            ("<think>\n", "\n</think>\n\n<|im_end|>"),
            ("", "<think>\n\n</think>\n\n<|im_end|>"),
            ("", "<|im_end|>"),
        ],
    )
    @pytest.mark.parametrize("family", [HERMES, XML], ids=["hermes", "qwen-xml"])
    def test_a_reply_with_nothing_in_its_parts_is_empty(self, family, prompt_end, text):
        reply = read_text(family, f"<|im_start|>assistant\n{prompt_end}", text, [])
        assert (reply.content, reply.reasoning, reply.tool_calls) == ("", "", [])

    def test_a_llama_call_may_begin_with_its_type(self):
        text = '{"type": "function", "name": "look", "parameters": {"string": "x"}}<|eot_id|>'
        reply = read_text(families()["llama"], "", text, TOOLS)
        assert called(reply) == [("look", {"string": "x"})]

    @pytest.mark.parametrize(
        ("call", "calls"),
        [
            (
                "[look(a='x', b=[1, true], c=null), go()]",
                [("look", {"a": "x", "b": [1, True], "c": None}), ("go", {})],
            ),
            ("[look('x')]", []),
            ("[look(a=go())]", []),
            ("[look(a={1})]", []),
            ("look", []),
        ],
        ids=["two", "without its name", "a call in it", "a set", "no list"],
    )
    def test_a_list_of_python_calls_holds_json_values_by_name(self, call, calls):
        text = f"<|tool_call_start|>{call}<|tool_call_end|>"
        reply = read_text(families()["lfm"], "", text, [])
        assert called(reply) == calls
        assert reply.content == ("" if calls else text)


def test_a_python_call_is_read_up_to_a_length_since_nothing_else_runs_meanwhile():
    text = f"<|tool_call_start|>[look(string='{'x' * 32_768}')]<|tool_call_end|>"
    reply = read_text(families()["lfm"], "", text, TOOLS)
    assert (reply.content, reply.tool_calls) == (text, [])
    assert reply.unread == "the call cannot be read: it has more than 32768 characters"


MARKS = [GOOD, *GOOD, "<think>", "</think>", "<|im_end|>", "é", "\0", "{", "}"]
"""Pieces of replies."""


@given(st.lists(st.sampled_from(MARKS) | st.sampled_from(LOOPS), max_size=30), st.data())
@examples(200)
def test_whatever_is_sampled_is_read_alike_in_every_split(pieces, data):
    text = "".join(pieces)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    for family in families().values():
        whole = read_text(family, "", text, TOOLS)
        parser = ReplyParser(family, "", ModelCall("m", [], TOOLS))
        new = [parser.feed(text[begin:end]) for begin, end in pairwise([0, *cuts, len(text)])]
        reply, rest = parser.finish()
        assert called(reply) == called(whole)
        sent = ["".join(texts) for texts in zip(*new, rest, strict=True)]
        assert sent == [reply.reasoning, reply.content] == [whole.reasoning, whole.content]


def test_marks_that_are_no_tokens_are_not_streamed_as_text(tmp_path):
    """Of Hermes models on other bases: the tags of calls are spelled by ordinary tokens."""
    tokenizer = AutoTokenizer.from_pretrained(QWEN)
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend["added_tokens"] = [
        each for each in backend["added_tokens"] if "tool" not in each["content"]
    ]
    plain = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(backend)), eos_token="<|im_end|>"
    )
    plain.chat_template = (TEMPLATES / "qwen2_5.jinja").read_text()
    plain.save_pretrained(tmp_path)
    rendering = Rendering(str(tmp_path))
    assert rendering.family.name == "hermes"
    ids = rendering.tokenizer.encode(
        "One sentence. Another one. And a third. " + GOOD + "<|im_end|>"
    )
    growing = rendering.sampled_reply([], ModelCall(model="m", messages=[], tools=TOOLS))
    streamed = "".join(growing.feed([token_id])[1] for token_id in ids)
    whole, (_, rest) = growing.finish()
    assert (streamed + rest, whole.content) == ("One sentence. Another one. And a third.",) * 2
    assert called(whole) == [("look", {"string": "x"})]


def test_a_stop_token_is_no_part_of_reasoning(tmp_path):
    rendering = save(tmp_path, variants("qwen3_5_think")["as it is"])
    reply = rendering.read(
        rendering.tokenizer.encode("<|im_start|>assistant\n<think>\n"),
        rendering.tokenizer.encode("I<|im_end|>"),
        [],
    )[0]
    assert (reply.reasoning, reply.content) == ("I", "")


class TestChoice:
    def test_a_renderer_that_splits_the_templates_text_into_other_tokens_is_used_and_told_of(
        self, tmp_path
    ):
        rendering = save(tmp_path, variants("qwen3_5_think")["as it is"])
        (note,) = rendering.notes
        assert "the renderer qwen3.5 write the same text in different tokens" in note
        assert save(tmp_path, variants("qwen3")["as it is"]).notes == []

    def test_a_tokenizers_own_response_template_comes_first(self, tmp_path):
        tokenizer = AutoTokenizer.from_pretrained(QWEN)
        tokenizer.chat_template = (TEMPLATES / "qwen2_5.jinja").read_text()
        tokenizer.response_template = {
            "start_anchor": "<|im_start|>assistant\n",
            "fields": {
                "tool_calls": {
                    "open": "<tool_call>",
                    "close": "</tool_call>",
                    "content": "json",
                    "repeats": True,
                },
                "content": {"close_pattern": r"<\|im_end\|>\s*"},
            },
        }
        tokenizer.save_pretrained(tmp_path)
        rendering = Rendering(str(tmp_path))
        assert (rendering.family.name, rendering.lacks) == ("own", [])
        assert examine(rendering).works

    @pytest.mark.parametrize(
        "own", [{}, {"fields": {}}, "x", {"fields": {"tool_calls": {}}, "start_anchor": "x"}]
    )
    def test_an_own_response_template_that_is_none_is_passed_over(self, own):
        tokenizer = AutoTokenizer.from_pretrained(QWEN)
        tokenizer.response_template = own
        written = written_turns(Rendering(str(QWEN))._write)
        assert find_family(tokenizer, written, "auto").name == "hermes"

    def test_a_family_can_be_named_for_a_template_that_writes_no_calls(self, tmp_path):
        save(tmp_path, (TEMPLATES / "lfm2.jinja").read_text())
        rendering = Rendering(str(tmp_path), tool_parser="lfm")
        assert (rendering.unreadable, rendering.lacks) == (None, [])
        ids = rendering.tokenizer.encode(
            "<|tool_call_start|>[look(string='x')]<|tool_call_end|><|im_end|>"
        )
        assert [call.name for call in rendering.read([], ids, TOOLS)[0].tool_calls] == ["look"]

    def test_an_unknown_one_is_refused_with_all_names(self):
        with pytest.raises(InputError, match=r"'hermès': choose auto, hermes, qwen-xml, glm"):
            Rendering(str(QWEN), tool_parser="hermès")


def test_the_tests_qwen35_has_the_template_of_its_family():
    assert (ROOT / "tests/models/qwen3.5-4b/chat_template.jinja").read_text() == variants(
        "qwen3_5_think"
    )["as it is"]


CASES = [(stem, variant) for stem in WITH_TOOLS for variant in variants(stem)]


@cache
def examined(stem, variant):
    """Return how a variant of a template does, None when its calls cannot be read, and what its
    model lacks.

    Also return why control tokens in texts are not kept texts.
    """
    with tempfile.TemporaryDirectory() as folder:
        rendering = save(folder, variants(stem)[variant])
        found = examine(rendering) if not rendering.unreadable else None
        return found, rendering.lacks, rendering.controls.exposed


@pytest.mark.parametrize(("stem", "variant"), CASES)
def test_a_template_is_read_and_continued_by_its_defaults_or_refused_by_name(stem, variant):
    found, lacks, exposed = examined(stem, variant)
    assert exposed is None
    if stem in WITHOUT_CALLS:
        (lack,) = lacks
        assert re.search(
            r"^the tool calls of /.* cannot be read: .*rolltap_tool_parser: hermes, qwen-xml", lack
        )
    else:
        assert lacks == []
        assert found.works, found


def table():
    """Return the table of the page on models: a line for each template."""
    lines = [
        "| template | prompts by | replies by | one call | two | awkward | reasoning | variants |",
        "| --- " * 8 + "|",
    ]
    for stem in WITH_TOOLS:
        cells = [examined(stem, variant)[0] for variant in variants(stem)]
        found = cells[0]
        if found is None:
            lines.append(f"| `{stem}` | `default` | refused: it writes no calls | | | | | |")
            continue
        turns = [
            found.turns[name]
            for name in ("one call", "two calls", "awkward arguments", "reasoning")
        ]
        good = sum(each is not None and each.works for each in cells)
        names = f"`{found.prompts}` | `{found.replies}`"
        lines.append(f"| `{stem}` | {names} | {' | '.join(turns)} | {good} of {len(cells)} |")
    return lines


def test_the_table_of_the_readme_is_what_this_test_finds():
    assert "\n".join(table()) in (ROOT / "recipes" / "site" / "pages" / "models.md").read_text()


if __name__ == "__main__":
    print("\n".join(table()))
