"""Templates that no renderer knows are continued when they render each message independently, else
refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from rolltap.addons.dialects.call import assistant_message, message_tool_call
from rolltap.addons.dialects.dialect import name_results
from rolltap.addons.prompts import rendering as module
from rolltap.addons.prompts.rendering import Rendering
from rolltap.addons.prompts.template import (
    Placeholder,
    TemplateContinuation,
    placeholder_turn,
    tokens_of_turns,
)
from rolltap.addons.prompts.tokenizer import BREAK
from tests.addons.conftest import TEMPLATE
from tests.addons.prompts import continuing
from tests.addons.prompts.test_rendering import USER, VISION, pieces
from tests.deep import examples

TURN = "{{ '<|im_start|>' + message.role + '\\n' + message.content + '\\n' }}"
CALLS = (
    "{% for call in message.tool_calls or [] %}{{ '@' + call.function.name }}"
    + "{% for value in call.function.arguments.values() %}{{ value }}{% endfor %}{% endfor %}"
)
END = "{{ '<|im_end|>\\n\\n' }}"
GENERATION = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
PLAIN = "{% for message in messages %}" + TURN + CALLS + END + "{% endfor %}" + GENERATION

CONVERSATION = [{"role": "system", "content": "Be brief."}, USER]
NEW = [{"role": "user", "content": "Go on"}]


@pytest.fixture
def rendering_of(tmp_path, save_tokenizer):
    return lambda template: Rendering(save_tokenizer(tmp_path, template), "default")


@pytest.fixture(scope="module")
def plain(tmp_path_factory, save_tokenizer):
    return Rendering(save_tokenizer(tmp_path_factory.mktemp("plain"), PLAIN), "default")


def assistant(text):
    return assistant_message(text, "", [])


def answered(text, messages):
    """Return a turn of `text` with the calls that results in `messages` answer."""
    calls = placeholder_turn(messages).get("tool_calls", [])
    return assistant_message(
        text, "", [message_tool_call(each["id"], each["function"]["name"], {}) for each in calls]
    )


@pytest.mark.parametrize(
    "new",
    [NEW, [{"role": "tool", "content": "Nothing.", "tool_call_id": "c9", "name": "look"}], NEW * 2],
)
@pytest.mark.parametrize("end", ["<|im_end|>", ""], ids=["ended", "truncated"])
def test_a_continuation_is_what_the_template_writes_after_a_turn(plain, encode, new, end):
    assert plain.refusal is None
    prompt = plain.render(CONVERSATION, [])
    completion = encode("Hi.\n" + end)
    continued = continuing.continued(plain, prompt, completion, new, [])
    assert continued == plain.render([*CONVERSATION, assistant("Hi."), *new], [])
    assert continued[: len(prompt) + len(completion)] == prompt + completion


def test_a_message_that_the_template_refuses_is_not_continued(rendering_of, encode):
    picky = (
        "{% for message in messages %}{% if message.content == 'No' %}{{ raise_exception('no') }}{%"
        " endif %}"
    )
    rendering = rendering_of(PLAIN.replace("{% for message in messages %}", picky))
    assert rendering.refusal is None
    prompt, refused = rendering.render(CONVERSATION, []), {"role": "user", "content": "No"}
    assert continuing.continued(rendering, prompt, encode("Hi."), [refused], []) is None


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
    calls = [message_tool_call("c1", "look", {}), message_tool_call("c2", "go", {})]
    asked = {"role": "assistant", "content": "Hi.", "tool_calls": calls}
    results = [{"role": "tool", "content": "x", "tool_call_id": i} for i in ("c2", "c9", "c1")]
    whole = name_results([*CONVERSATION, asked, *results])
    prompt, completion = rendering.render(CONVERSATION, []), encode("Hi.\n@look@go<|im_end|>")
    continued = continuing.continued(rendering, prompt, completion, whole[3:], [])
    assert continued == rendering.render(whole, [])


def test_a_template_that_takes_one_call_a_turn_is_continued(rendering_of):
    single = (
        "{% if message.tool_calls and message.tool_calls | length > 1 %}{{ raise_exception('one')"
        " }}{% endif %}"
    )
    assert rendering_of(PLAIN.replace(TURN, single + TURN)).refusal is None


FIRST_TOOL = "{% if tools and message.role == 'tool' %}{{ tools[0].function.name }}{% endif %}"
MARKED = "{% if message.role == 'assistant' and not loop.last %}{{ 'x' }}{% endif %}"


def test_a_template_that_marks_the_last_turn_takes_no_turns_of_the_assistant(rendering_of, encode):
    marked = "{% if message.role == 'assistant' and loop.index == 9 %}{{ 'x' }}{% endif %}"
    rendering = rendering_of(PLAIN.replace(CALLS, CALLS + marked))
    prompt, completion = rendering.render(CONVERSATION, []), encode("Hi.<|im_end|>")
    assert continuing.continued(rendering, prompt, completion, NEW, []) is not None
    assert (
        continuing.continued(rendering, prompt, completion, [*NEW, assistant("Well."), *NEW], [])
        is None
    )


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
    rendering_of, encode, template, reason
):
    rendering = rendering_of(template)
    assert reason in rendering.refusal
    assert (
        continuing.continued(rendering, rendering.render(NEW, []), encode("Hi.<|im_end|>"), NEW, [])
        is None
    )


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | length }}" + PLAIN,
        PLAIN.replace(TURN, "{% if not loop.last %}{{ '!' }}{% endif %}" + TURN),
    ],
    ids=["counts the messages", "rewrites earlier turns"],
)
def test_a_template_that_rewrites_what_is_before_a_turn_is_continued_with_the_sampled_tokens(
    rendering_of, encode, template
):
    rendering = rendering_of(template)
    assert rendering.refusal is None
    prompt, completion = rendering.render(CONVERSATION, []), encode("Hi.<|im_end|>")
    continued = continuing.continued(rendering, prompt, completion, NEW, [])
    assert continued[: len(prompt) + len(completion)] == prompt + completion
    whole = rendering.render([*CONVERSATION, assistant("Hi."), *NEW], [])
    after = continued[len(prompt) + len(completion) :]
    assert after == whole[-len(after) :]


def test_a_turn_that_ends_otherwise_than_the_template_writes_is_not_continued(rendering_of, encode):
    rendering = rendering_of(PLAIN)
    other = encode("<|im_start|>")
    stop_ids = rendering.stop_token_ids + other
    template = TemplateContinuation(rendering._render, rendering.tokenizer.encode, stop_ids, [])
    assert template.refusal is None
    assert template.extension([*encode("Hi."), *rendering.stop_token_ids], NEW) is not None
    assert template.extension([*encode("Hi."), *other], NEW) is None


def test_a_template_that_writes_no_calls_is_continued_with_text_only(rendering_of, encode):
    rendering = rendering_of(PLAIN.replace(CALLS, ""))
    assert rendering.refusal is None
    prompt, completion = rendering.render(CONVERSATION, []), encode("Hi.<|im_end|>")
    assert continuing.continued(rendering, prompt, completion, NEW, []) is not None
    assert continuing.continued(rendering, prompt, completion, [RESULT], []) is None


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


TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "", "parameters": {"type": "object"}},
    }
]
LOOK = message_tool_call("c1", "look", {"at": "é"})
RESULT = {"role": "tool", "content": "Nothing.", "tool_call_id": "c1", "name": "look"}
INVENTED = [assistant_message("", "", [LOOK]), RESULT]
TAILS = {
    "an answer": [USER, assistant("Hi."), USER],
    "a call and its result": [USER, *INVENTED],
    "a call after a result": [RESULT, *INVENTED],
    "a call immediately": [*INVENTED, USER],
    "reasoning": [USER, assistant_message("Hi.", "I greet.", []), USER],
    "several": [
        USER,
        *INVENTED,
        assistant_message("So.", "", [LOOK]),
        RESULT,
        assistant("Hi."),
        USER,
    ],
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
@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS)
def test_the_tokens_after_a_turn_are_those_of_a_full_prompt(any_rendering, encode, tail, tools):
    prompt = any_rendering.render([USER], tools)
    opened = prompt[-2:] == encode("<think>\n")
    turn = answered("Hi.", tail)
    completion = encode(("I greet.\n</think>\n\n" if opened else "") + "Hi.<|im_end|>")
    whole = any_rendering.render(name_results([USER, turn, *tail]), tools)
    continued = continuing.continued(any_rendering, prompt, completion, tail, tools)
    assert continued[: len(prompt) + len(completion)] == prompt + completion
    assert (
        whole[-(len(continued) - len(prompt) - len(completion)) :]
        == continued[len(prompt) + len(completion) :]
    )


@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS)
@pytest.mark.parametrize("completion", ["Hi.", "<think>\nI"], ids=["cut", "cut in its reasoning"])
def test_a_cut_turn_is_ended_as_for_other_messages(any_rendering, encode, completion, tail):
    prompt, sampled = any_rendering.render([USER], []), encode(completion)
    other = continuing.continued(any_rendering, prompt, sampled, [USER], [])
    continued = continuing.continued(any_rendering, prompt, sampled, tail, [])
    end = len(prompt) + len(sampled) + 1
    assert continued[:end] == other[:end]
    assert continued[-3:] == any_rendering.render([USER, *tail], [])[-3:]


texts = st.lists(pieces, max_size=12).map("".join)
messages = st.one_of(
    st.builds(lambda text: {"role": "user", "content": text}, texts),
    st.builds(lambda text: {**RESULT, "content": text}, texts),
    st.builds(assistant_message, texts, texts, st.sampled_from([[], [LOOK]])),
)


@given(prompt=texts, completion=texts, tail=st.lists(messages, min_size=1, max_size=5))
@examples(200)
def test_whatever_the_tail_no_sampled_token_changes(
    any_rendering, encode, prompt, completion, tail
):
    prompt_ids, completion_ids = encode(prompt), encode(completion)
    ids = continuing.continued(any_rendering, prompt_ids, completion_ids, tail, [])
    if ids is not None:
        sampled = len(prompt_ids) + len(completion_ids)
        assert ids[:sampled] == prompt_ids + completion_ids
        whole = any_rendering.render([USER, answered("Hi.", tail), *tail], [])
        stop_ids = any_rendering.stop_token_ids
        extension = ids[sampled:]
        if completion_ids[-1:] not in [[i] for i in stop_ids]:
            extension = extension[
                next(i for i, token in enumerate(extension) if token in stop_ids) + 1 :
            ]
        assert whole[-len(extension) :] == extension


new_messages = st.builds(
    lambda role, text: {"role": role, "content": text, "tool_call_id": "c"},
    st.sampled_from(["user", "tool", "system"]),
    texts,
)


@given(prompt=texts, completion=texts, messages=st.lists(new_messages, min_size=1, max_size=3))
@examples(200)
def test_a_renderer_that_is_given_only_a_suffix_of_the_prompt_continues_the_whole(
    any_rendering, encode, prompt, completion, messages
):
    arguments = encode(prompt), encode(completion), messages, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_READS_ONE_TURN", frozenset())
        whole = continuing.continued(any_rendering, *arguments)
    assert continuing.continued(any_rendering, *arguments) == whole


AFTER = [*b"uG"]
"""The end of a prompt after a turn with the end E, before a user's message."""


class TestTokensOfTurns:
    """With a renderer of letters: a turn of the assistant is `A...E`, where E ends it."""

    def placeholder(self, changed=lambda text: text):
        def render(messages, tools, generation):
            turns = {
                "user": lambda m: "u",
                "assistant": lambda m: f"A{m['content']}E",
                "tool": lambda m: "t",
            }
            text = "".join(turns[m["role"]](m) for m in messages) + "G"
            return [*changed(text.replace(BREAK, "")).encode()]

        return Placeholder(render, lambda text: [*text.encode()], [ord("E")])

    def test_they_are_what_a_full_prompt_has_after_the_placeholder(self):
        tail = [USER, assistant("x"), RESULT]
        assert tokens_of_turns(self.placeholder(), AFTER, True, tail, []) == [*b"uAxEtG"]
        assert tokens_of_turns(self.placeholder(), [*b"E", *AFTER], False, tail, []) == [
            *b"EuAxEtG"
        ]

    @pytest.mark.parametrize(
        ("changed", "tokens"),
        [
            (lambda text: text.replace("uG", "vG"), None),
            (lambda text: text.replace("7E", "7") if "x" in text else text, None),
            (lambda text: text.replace("Aa8", "A?a8") if "x" in text else text, [*b"AxEuG"]),
        ],
        ids=[
            "other tokens after a turn",
            "a turn whose end depends on later ones",
            "another text before the turn",
        ],
    )
    def test_there_are_none_when_the_placeholder_is_ended_otherwise(self, changed, tokens):
        tail = [assistant("x"), USER]
        assert tokens_of_turns(self.placeholder(changed), AFTER, True, tail, []) == tokens

    def test_there_are_none_without_a_placeholder_or_for_messages_that_the_template_refuses(self):
        def refuse(messages, tools, generation):
            raise ValueError("no")

        for render in (refuse, lambda messages, tools, generation: []):
            placeholder = Placeholder(render, lambda text: [*text.encode()], [ord("E")])
            assert tokens_of_turns(placeholder, AFTER, True, [USER], []) is None
