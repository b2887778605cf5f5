"""Every chat template with tools that TRL ships is read and continued, or refused by name.

Each is put into a folder of its own, with a tokenizer that has its family's tokens: as it is, with a comment, with
another sentence, and as its training variant. `python -m tests.addons.prompts.test_families` prints the table of
addons/README.md.
"""

import re
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from rolltap.addons.dialects.dialect import name_results
from rolltap.addons.dialects.model_call import ModelCall
from rolltap.addons.dialects.tools import as_object
from rolltap.addons.prompts.families import _TOOLS, TURNS, written_turns
from rolltap.addons.prompts.rendering import Rendering
from rolltap.addons.prompts.reply import GrowingReply

TRL = find_spec("trl")
if TRL is None or TRL.origin is None:
    pytest.skip("TRL is not installed: its chat templates are the cases", allow_module_level=True)
ROOT = Path(__file__).resolve().parents[3]
TEMPLATES = Path(TRL.origin).parent / "chat_templates"
WITH_TOOLS = sorted(
    path.stem
    for path in TEMPLATES.glob("*.jinja")
    if re.search(r"\btools\b", path.read_text()) and "_training" not in path.name
)
WITHOUT_CALLS = {"lfm2"}
"""Templates that write no tool calls, so that nothing says how the model does."""
VARIANTS = {
    "as it is": lambda text: text,
    "with a comment": lambda text: "{#- Copied by a mirror. #}" + text,
    "with another sentence": lambda text: re.sub(r"(?<=[a-z]) (you|the|these) (?=[a-z])", r" all \1 ", text),
}
END_OF_TEXT = "<|endoftext|>"
ENDS = re.compile(r"<\|im_end\|>|<\|eot_id\|>|<turn\|>|<\|eot\|>|<\|return\|>|<\|user\|>")
_SPECIAL = re.compile(r"<\|[a-z_]+\|?>|<[a-z_]+\|>")
MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
ACROSS = [".\n\n", ">\n"]
"""Tokens across the borders of what templates write."""


def variants(stem):
    """Return the template's text in each variant."""
    found = {name: change((TEMPLATES / f"{stem}.jinja").read_text()) for name, change in VARIANTS.items()}
    training = TEMPLATES / f"{stem}_training.jinja"
    return found | ({"for training": training.read_text()} if training.is_file() else {})


@cache
def tokens():
    """Return the quickstart's tokenizer with tokens across borders, as JSON."""
    backend = Tokenizer.from_file(str(ROOT / "tests/models/qwen3-4b/tokenizer.json"))
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
        return all(found in ("yes", "-") for found in self.turns.values()) and self.turns["one call"] == "yes"


def examine(rendering):
    """Return how a rendering reads, streams and continues the turns that the model's template writes."""
    written = written_turns(rendering._tokenizer)
    turns = {name: one(rendering, name, *written[name]) if name in written else "-" for name in TURNS}
    return Found(rendering.name, rendering.name if rendering.family is None else rendering.family.name, turns)


def one(rendering, name, prompt_end, text):
    turn = TURNS[name]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in turn.get("tool_calls", [])]
    reasoning = turn.get("reasoning_content", "")
    if not all(part in text for part in (turn["content"], reasoning, *(call[0] for call in calls))):
        return "-"
    ids = sampled(rendering, text, NEXT[bool(calls)])
    prompt = rendering.encode(prompt_end)
    model_call = ModelCall(model="m", messages=[{"role": "user", "content": "Look."}], tools=_TOOLS)
    reply = rendering.parse(prompt, ids, _TOOLS)
    message = reply.to_message()
    got = [
        (call["function"]["name"], as_object(call["function"]["arguments"])) for call in message.get("tool_calls", [])
    ]
    if got != calls:
        return f"reads the calls {got}"
    if (reply.reasoning, reply.content) != (reasoning, turn["content"]):
        return f"reads {reply.reasoning!r} and {reply.content!r}"
    growing, streamed = GrowingReply(rendering, prompt, model_call), ["", ""]
    for end in range(1, len(ids) + 1):
        streamed = [old + new for old, new in zip(streamed, growing.feed(ids[:end]), strict=True)]
    whole, rest = growing.finish(ids)
    streamed = [old + new for old, new in zip(streamed, rest, strict=True)]
    if streamed != [whole.reasoning, whole.content] or whole.content != reply.content:
        return f"streams {streamed}"
    results = [{"role": "tool", "content": "Seen.", "tool_call_id": call["id"]} for call in turn.get("tool_calls", [])]
    new = name_results([turn, *(results or [{"role": "user", "content": "Go on."}])])[1:]
    continued = rendering.continued(prompt, ids, new, _TOOLS)
    if continued is None:
        return f"is not continued: {rendering.refusal}"
    whole_text = rendering._tokenizer.apply_chat_template(
        [{"role": "user", "content": "Look."}, turn, *new], tools=_TOOLS, add_generation_prompt=True, tokenize=False
    )
    extension = rendering._tokenizer.decode(continued[len(prompt) + len(ids) :])
    if continued[: len(prompt) + len(ids)] != prompt + ids or not whole_text.endswith(extension):
        return f"continues with {extension!r}"
    return "yes"


NEXT = {True: "<|observation|>", False: "<|user|>"}
"""The token that ends a turn of GLM: it begins the next one."""


def sampled(rendering, text, following):
    """Return the ids of a turn up to the token that ends it, as a model would sample them."""
    ids, stops = rendering.encode(text), rendering.stop_token_ids()
    end = next((n for n, token in enumerate(ids) if token in stops), None)
    return ids + rendering.encode(following) if end is None else ids[: end + 1]


CASES = [(stem, variant) for stem in WITH_TOOLS for variant in variants(stem)]


@pytest.mark.parametrize(("stem", "variant"), CASES)
def test_a_template_is_read_and_continued_by_its_defaults_or_refused_by_name(tmp_path, stem, variant):
    rendering = save(tmp_path, variants(stem)[variant])
    if stem in WITHOUT_CALLS:
        lack, _ = rendering.lacks
        assert f"the tool calls of {tmp_path} cannot be read" in lack
        assert "rolltap_tool_parser" in lack
        return
    assert rendering.lacks == []
    found = examine(rendering)
    assert found.works, found


def table():
    """Return the table of addons/README.md: a line for each template."""
    lines = [
        "| template | prompts by | replies by | one call | two | awkward | reasoning | variants |",
        "| --- " * 8 + "|",
    ]
    for stem in WITH_TOOLS:
        cells = []
        for text in variants(stem).values():
            with tempfile.TemporaryDirectory() as folder:
                rendering = save(folder, text)
                cells.append(examine(rendering) if rendering.reads_calls else None)
        found = cells[0]
        if found is None:
            lines.append(f"| `{stem}` | `default` | refused: it writes no calls | | | | | |")
            continue
        turns = [found.turns[name] for name in ("one call", "two calls", "awkward arguments", "reasoning")]
        good = sum(each is not None and each.works for each in cells)
        lines.append(
            f"| `{stem}` | `{found.prompts}` | `{found.replies}` | {' | '.join(turns)} | {good} of {len(cells)} |"
        )
    return lines


def test_the_table_of_the_readme_is_what_this_test_finds():
    assert "\n".join(table()) in (ROOT / "addons" / "README.md").read_text()


if __name__ == "__main__":
    print("\n".join(table()))
