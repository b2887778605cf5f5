"""Templates that no renderer knows are continued when they render each message independently, else
refused."""

from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from rolltap.addons.dialects.call import assistant_message, message_tool_call
from rolltap.addons.dialects.dialect import name_results
from rolltap.addons.prompts import rendering as module
from rolltap.addons.prompts.probes import TOOLS
from rolltap.addons.prompts.rendering import Rendering
from rolltap.addons.prompts.template import (
    Placeholder,
    TemplateContinuation,
    placeholder_turn,
    tokens_of_turns,
)
from rolltap.addons.prompts.tokenizer import BREAK
from tests.addons.conftest import MARKUP, SPECIAL, TEMPLATE
from tests.addons.harness import user
from tests.addons.prompts.talks import continued, named
from tests.deep import examples

TURN = "{{ '<|im_start|>' + message.role + '\\n' + message.content + '\\n' }}"
CALLS = (
    "{% for call in message.tool_calls or [] %}{{ '@' + call.function.name }}"
    + "{% for value in call.function.arguments.values() %}{{ value }}{% endfor %}{% endfor %}"
)
END = "{{ '<|im_end|>\\n\\n' }}"
GENERATION = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
PLAIN = "{% for message in messages %}" + TURN + CALLS + END + "{% endfor %}" + GENERATION

USER = user()
SYSTEM = {"role": "system", "content": "Be brief."}
CONVERSATION = [SYSTEM, USER]
NEW = [user("Go on")]
LOOK = message_tool_call("c1", "look", {"at": "é"})
RESULT = {"role": "tool", "content": "Nothing.", "tool_call_id": "c1", "name": "look"}


@pytest.fixture
def rendering_of(tmp_path, save_tokenizer):
    def rendering_of(template):
        return Rendering(save_tokenizer(tmp_path, template), "default")

    return rendering_of


@pytest.fixture(scope="module")
def plain(tmp_path_factory, save_tokenizer):
    return Rendering(save_tokenizer(tmp_path_factory.mktemp("plain"), PLAIN), "default")


def assistant(text, *calls, reasoning=""):
    return assistant_message(text, reasoning, list(calls))


def answered(text, messages):
    """Return a turn of `text` with the calls that results in `messages` answer."""
    calls = []
    for each in placeholder_turn(messages).get("tool_calls", []):
        calls.append(message_tool_call(each["id"], each["function"]["name"], {}))
    return assistant(text, *calls)


def follow(rendering, messages, text="Hi.<|im_end|>"):
    """Return the ids that follow a turn of `text` in the conversation, or None."""
    prompt = rendering.render(CONVERSATION, [])
    return rendering.extension(prompt, rendering.tokenizer.encode(text), messages, [])


@pytest.mark.parametrize("new", [NEW, [{**RESULT, "tool_call_id": "c9"}], NEW * 2])
@pytest.mark.parametrize("end", ["<|im_end|>", ""], ids=["ended", "truncated"])
def test_a_continuation_is_what_the_template_writes_after_a_turn(plain, encode, new, end):
    assert plain.refusal is None
    prompt = plain.render(CONVERSATION, [])
    whole = continued(plain, prompt, encode("Hi.\n" + end), new)
    assert whole == plain.render([*CONVERSATION, assistant("Hi."), *new], [])


def test_a_message_that_the_template_refuses_is_not_continued(rendering_of):
    refuses = "{% if message.content == 'No' %}{{ raise_exception('no') }}{% endif %}"
    rendering = rendering_of(PLAIN.replace(TURN, refuses + TURN))
    assert rendering.refusal is None
    assert follow(rendering, [user("No")], "Hi.") is None


LOOKS_UP = (
    "{% if message.role == 'tool' %}{% for earlier in messages %}{% for call in earlier.tool_calls"
    " or [] %}{% if call.id == message.tool_call_id %}{{ call.function.name }}{% endif %}{% endfor"
    " %}{% endfor %}{% endif %}"
)


@pytest.mark.parametrize(
    "name", ["{{ message.name or '' }}", LOOKS_UP], ids=["its name", "the name of its call"]
)
def test_results_are_continued_with_the_names_of_their_own_tools(rendering_of, encode, name):
    rendering = rendering_of(PLAIN.replace(TURN, name + TURN))
    assert rendering.refusal is None
    asked = assistant("Hi.", message_tool_call("c1", "look", {}), message_tool_call("c2", "go", {}))
    results = [{"role": "tool", "content": "x", "tool_call_id": i} for i in ("c2", "c9", "c1")]
    whole = name_results([*CONVERSATION, asked, *results])
    prompt = rendering.render(CONVERSATION, [])
    ids = continued(rendering, prompt, encode("Hi.\n@look@go<|im_end|>"), whole[3:])
    assert ids == rendering.render(whole, [])


def test_a_template_that_takes_one_call_a_turn_is_continued(rendering_of):
    several = "message.tool_calls and message.tool_calls | length > 1"
    single = "{% if " + several + " %}{{ raise_exception('one') }}{% endif %}"
    assert rendering_of(PLAIN.replace(TURN, single + TURN)).refusal is None


FIRST_TOOL = "{% if tools and message.role == 'tool' %}{{ tools[0].function.name }}{% endif %}"
MARKED = "{% if message.role == 'assistant' and not loop.last %}{{ 'x' }}{% endif %}"


def test_a_template_that_marks_the_last_turn_takes_no_turns_of_the_assistant(rendering_of):
    marked = "{% if message.role == 'assistant' and loop.index == 9 %}{{ 'x' }}{% endif %}"
    rendering = rendering_of(PLAIN.replace(CALLS, CALLS + marked))
    assert follow(rendering, NEW) is not None
    assert follow(rendering, [*NEW, assistant("Well."), *NEW]) is None


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            PLAIN.replace(TURN, FIRST_TOOL + TURN),
            "writes new messages differently after other ones",
        ),
        (PLAIN.replace(END, ""), "does not end an assistant's turn with a stop token"),
        (PLAIN.replace(CALLS, CALLS + MARKED), "closes a turn differently when messages follow"),
        (
            "{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + PLAIN,
            "refuses a conversation with tools",
        ),
    ],
    ids=["the first tool's name", "no stop token", "marks past turns", "no tools"],
)
def test_a_template_that_closes_turns_or_writes_messages_in_several_ways_is_refused(
    rendering_of, template, reason
):
    rendering = rendering_of(template)
    assert reason in rendering.refusal
    assert follow(rendering, NEW) is None


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | length }}" + PLAIN,
        PLAIN.replace(TURN, "{% if not loop.last %}{{ '!' }}{% endif %}" + TURN),
    ],
    ids=["counts the messages", "rewrites earlier turns"],
)
def test_a_template_that_rewrites_what_is_before_a_turn_is_continued_with_the_sampled_tokens(
    rendering_of, template
):
    rendering = rendering_of(template)
    assert rendering.refusal is None
    after = follow(rendering, NEW)
    whole = rendering.render([*CONVERSATION, assistant("Hi."), *NEW], [])
    assert after == whole[-len(after) :]


def test_a_turn_that_ends_otherwise_than_the_template_writes_is_not_continued(plain, encode):
    def render(messages, tools, generation):
        return plain.tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=generation, return_dict=False
        )

    other = encode("<|im_start|>")
    stop_ids = plain.stop_token_ids + other
    template = TemplateContinuation(render, plain.tokenizer.encode, stop_ids, [])
    assert template.refusal is None
    assert template.extension([*encode("Hi."), *plain.stop_token_ids], NEW) is not None
    assert template.extension([*encode("Hi."), *other], NEW) is None


def test_a_template_that_writes_no_calls_is_continued_with_text_only(rendering_of):
    rendering = rendering_of(PLAIN.replace(CALLS, ""))
    assert rendering.refusal is None
    assert follow(rendering, NEW) is not None
    assert follow(rendering, [RESULT]) is None


def test_a_tokenizer_without_a_stop_token_is_refused(tmp_path, save_tokenizer):
    save_tokenizer(tmp_path, PLAIN)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    rendering = Rendering(str(tmp_path), "default")
    assert rendering.stop_token_ids == []
    assert "does not end an assistant's turn with a stop token" in rendering.refusal


def test_a_renderer_that_knows_its_model_has_no_refusal(tokenizer_folder):
    assert Rendering(str(tokenizer_folder)).refusal is None


INVENTED = [assistant("", LOOK), RESULT]
VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TAILS = {
    "an answer": [USER, assistant("Hi."), USER],
    "a call and its result": [USER, *INVENTED],
    "a call after a result": [RESULT, *INVENTED],
    "a call immediately": [*INVENTED, USER],
    "reasoning": [USER, assistant("Hi.", reasoning="I greet."), USER],
    "several": [USER, *INVENTED, assistant("So.", LOOK), RESULT, assistant("Hi."), USER],
    "a system message": [{"role": "system", "content": "It is late."}, assistant("Yes."), USER],
    "the end": [USER, assistant("Hi.")],
}


@pytest.fixture(scope="module", params=[*sorted(module._READS_ONE_TURN), "template"])
def any_rendering(request, tmp_path_factory, save_tokenizer):
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "template":
        return Rendering(save_tokenizer(folder, PLAIN), "default")
    return Rendering(save_tokenizer(folder, TEMPLATE.read_text(), VISION), request.param)


@pytest.mark.parametrize("tools", [[], TOOLS], ids=["no tools", "tools"])
@named("tail", TAILS)
def test_the_tokens_after_a_turn_are_those_of_a_full_prompt(any_rendering, encode, tail, tools):
    prompt = any_rendering.render([USER], tools)
    opened = prompt[-2:] == encode("<think>\n")
    completion = encode("I greet.\n</think>\n\nHi.<|im_end|>" if opened else "Hi.<|im_end|>")
    after = any_rendering.extension(prompt, completion, tail, tools)
    whole = any_rendering.render(name_results([USER, answered("Hi.", tail), *tail]), tools)
    assert after == whole[-len(after) :]


@named("tail", TAILS)
@pytest.mark.parametrize("completion", ["Hi.", "<think>\nI"], ids=["cut", "cut in its reasoning"])
def test_a_cut_turn_is_ended_as_for_other_messages(any_rendering, encode, completion, tail):
    prompt = any_rendering.render([USER], [])
    other = any_rendering.extension(prompt, encode(completion), [USER], [])
    after = any_rendering.extension(prompt, encode(completion), tail, [])
    assert after[0] == other[0]
    assert after[-3:] == any_rendering.render([USER, *tail], [])[-3:]


pieces = st.sampled_from(
    [*SPECIAL, *MARKUP, "<|im_start|>assistant\n", "<|im_end|>\n", "\n", "user\n", "Hi", " ", "é"]
)
texts = st.lists(pieces, max_size=12).map("".join)
calls = st.sampled_from([[], [LOOK]])
replies = st.builds(assistant_message, content=texts, reasoning=texts, tool_calls=calls)
others = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "tool", "system"]),
        "content": texts,
        "tool_call_id": st.just("c"),
    }
)


def result_of(text):
    return {**RESULT, "content": text}


tails = st.lists(texts.map(user) | texts.map(result_of) | replies, min_size=1, max_size=5)


@given(prompt=texts, completion=texts, tail=tails)
@examples(200)
def test_whatever_the_tail_no_sampled_token_changes(
    any_rendering, encode, prompt, completion, tail
):
    completion_ids = encode(completion)
    after = any_rendering.extension(encode(prompt), completion_ids, tail, [])
    if after is not None:
        stop_ids = any_rendering.stop_token_ids
        if not set(completion_ids[-1:]) & set(stop_ids):
            while after.pop(0) not in stop_ids:
                pass
        whole = any_rendering.render([USER, answered("Hi.", tail), *tail], [])
        assert whole[-len(after) :] == after


@given(prompt=texts, completion=texts, messages=st.lists(others, min_size=1, max_size=3))
@examples(200)
def test_a_renderer_that_is_given_only_a_suffix_of_the_prompt_continues_the_whole(
    any_rendering, encode, prompt, completion, messages
):
    arguments = (encode(prompt), encode(completion), messages, [])
    with mock.patch.object(module, "_READS_ONE_TURN", frozenset()):
        whole = any_rendering.extension(*arguments)
    assert any_rendering.extension(*arguments) == whole


AFTER = [*b"uG"]
"""The end of a prompt after a turn with the end E, before a user's message."""


def letters(text):
    return [*text.encode()]


def as_is(text):
    return text


def other_after(text):
    return text.replace("uG", "vG")


def other_end(text):
    return text.replace("7E", "7") if "x" in text else text


def other_before(text):
    return text.replace("Aa8", "A?a8") if "x" in text else text


class TestTokensOfTurns:
    """With a renderer of letters: a turn of the assistant is `A...E`, where E ends it."""

    def placeholder(self, changed=as_is):
        def render(messages, tools, generation):
            turns = {"user": "u", "tool": "t"}
            text = ""
            for message in messages:
                text += turns.get(message["role"], f"A{message['content']}E")
            return letters(changed(text.replace(BREAK, "") + "G"))

        return Placeholder(render, letters, letters("E"))

    def test_they_are_what_a_full_prompt_has_after_the_placeholder(self):
        tail = [USER, assistant("x"), RESULT]
        ended = tokens_of_turns(self.placeholder(), AFTER, True, tail, [])
        cut = tokens_of_turns(self.placeholder(), letters("E") + AFTER, False, tail, [])
        assert (ended, cut) == (letters("uAxEtG"), letters("EuAxEtG"))

    @pytest.mark.parametrize(
        ("changed", "tokens"),
        [(other_after, None), (other_end, None), (other_before, letters("AxEuG"))],
        ids=[
            "other tokens after a turn",
            "a turn whose end depends on later ones",
            "another text before the turn",
        ],
    )
    def test_there_are_none_when_the_placeholder_is_ended_otherwise(self, changed, tokens):
        tail = [assistant("x"), USER]
        assert tokens_of_turns(self.placeholder(changed), AFTER, True, tail, []) == tokens

    def test_there_are_none_when_the_end_of_the_turn_is_written_twice_or_not_at_all(self):
        for after, ended in ((AFTER, False), (letters("E") + AFTER, True)):
            assert tokens_of_turns(self.placeholder(), after, ended, [USER], []) is None

    @pytest.mark.parametrize(
        "render",
        [mock.Mock(side_effect=ValueError("no")), mock.Mock(return_value=[])],
        ids=["messages are refused", "no placeholder"],
    )
    def test_there_are_none_without_the_placeholder(self, render):
        placeholder = Placeholder(render, letters, letters("E"))
        assert tokens_of_turns(placeholder, AFTER, True, [USER], []) is None
