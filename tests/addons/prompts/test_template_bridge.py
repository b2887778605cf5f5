"""Templates that no renderer knows are bridged when they render each message independently, else refused."""

import pytest
from transformers import AutoTokenizer

from rolltap.addons.dialects.dialect import name_results
from rolltap.addons.dialects.model_call import message_tool_call
from rolltap.addons.prompts.rendering import Rendering

TURN = "{{ '<|im_start|>' + message.role + '\\n' + message.content + '\\n' }}"
CALLS = "{% for call in message.tool_calls or [] %}{{ '@' + call.function.name }}{% endfor %}"
END = "{{ '<|im_end|>\\n\\n' }}"
GENERATION = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
PLAIN = "{% for message in messages %}" + TURN + CALLS + END + "{% endfor %}" + GENERATION

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
]
NEW = [{"role": "user", "content": "Go on"}]


@pytest.fixture
def rendering(tmp_path, save_tokenizer):
    save_tokenizer(tmp_path, PLAIN)
    return Rendering(str(tmp_path), "default")


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    "new", [NEW, [{"role": "tool", "content": "Nothing.", "tool_call_id": "c9", "name": "look"}], NEW * 2]
)
def test_the_bridge_is_what_the_template_writes_after_a_turn(rendering, encode, new):
    assert rendering.refusal is None
    prompt = rendering.render(CONVERSATION, [])
    completion = encode("Hi.\n<|im_end|>")
    bridged = rendering.bridge(prompt, completion, new, [])
    assert bridged == rendering.render([*CONVERSATION, assistant("Hi."), *new], [])
    assert bridged[: len(prompt) + len(completion)] == prompt + completion


def test_a_truncated_turn_gets_its_stop_token(rendering, encode):
    prompt = rendering.render(CONVERSATION, [])
    bridged = rendering.bridge(prompt, encode("Hi.\n"), NEW, [])
    assert bridged == rendering.render([*CONVERSATION, assistant("Hi."), *NEW], [])


def test_a_message_that_the_template_refuses_is_not_bridged(tmp_path, encode, save_tokenizer):
    picky = "{% for message in messages %}{% if message.content == 'No' %}{{ raise_exception('no') }}{% endif %}"
    save_tokenizer(tmp_path, PLAIN.replace("{% for message in messages %}", picky))
    rendering = Rendering(str(tmp_path), "default")
    assert rendering.refusal is None
    prompt, refused = rendering.render(CONVERSATION, []), {"role": "user", "content": "No"}
    assert rendering.bridge(prompt, encode("Hi."), [refused], []) is None


LOOKS_UP = (
    "{% if message.role == 'tool' %}{% for earlier in messages %}{% for call in earlier.tool_calls or [] %}"
    "{% if call.id == message.tool_call_id %}{{ call.function.name }}{% endif %}{% endfor %}{% endfor %}{% endif %}"
)


@pytest.mark.parametrize("name", ["{{ message.name or '' }}", LOOKS_UP], ids=["its name", "the name of its call"])
def test_results_are_continued_with_the_names_of_their_own_tools(tmp_path, encode, save_tokenizer, name):
    save_tokenizer(tmp_path, PLAIN.replace(TURN, name + TURN))
    rendering = Rendering(str(tmp_path), "default")
    assert rendering.refusal is None
    calls = [message_tool_call("c1", "look", {}), message_tool_call("c2", "go", {})]
    asked = {"role": "assistant", "content": "Hi.", "tool_calls": calls}
    results = [{"role": "tool", "content": "x", "tool_call_id": i} for i in ("c2", "c9", "c1")]
    whole = name_results([*CONVERSATION, asked, *results])
    bridged = rendering.bridge(rendering.render(CONVERSATION, []), encode("Hi.\n@look@go<|im_end|>"), whole[3:], [])
    assert bridged == rendering.render(whole, [])


def test_a_template_that_takes_one_call_a_turn_is_bridged(tmp_path, save_tokenizer):
    single = "{% if message.tool_calls and message.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}"
    save_tokenizer(tmp_path, PLAIN.replace(TURN, single + TURN))
    assert Rendering(str(tmp_path), "default").refusal is None


def test_a_template_that_marks_the_last_turn_takes_no_turns_of_the_assistant(tmp_path, encode, save_tokenizer):
    marked = "{% if message.role == 'assistant' and loop.index == 4 %}{{ 'x' }}{% endif %}"
    save_tokenizer(tmp_path, PLAIN.replace(CALLS, CALLS + marked))
    rendering = Rendering(str(tmp_path), "default")
    prompt, completion = rendering.render(CONVERSATION, []), encode("Hi.<|im_end|>")
    assert rendering.bridge(prompt, completion, NEW, []) is not None
    assert rendering.bridge(prompt, completion, [*NEW, assistant("Well."), *NEW], []) is None


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            PLAIN.replace(
                TURN, "{% if tools and message.role == 'tool' %}{{ tools[0].function.name }}{% endif %}" + TURN
            ),
            "writes earlier messages differently",
        ),
        (PLAIN.replace(END, ""), "does not end an assistant's turn with a stop token"),
        ("{{ messages | length }}" + PLAIN, "writes earlier messages differently"),
        (
            PLAIN.replace(CALLS, "{% if message.role == 'assistant' and not loop.last %}{{ 'x' }}{% endif %}"),
            "writes earlier messages differently",
        ),
        ("{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + PLAIN, "refuses a conversation with tools"),
    ],
    ids=["the first tool's name", "no stop token", "counts the messages", "marks past turns", "no tools"],
)
def test_a_template_that_changes_earlier_messages_is_refused(tmp_path, encode, template, reason, save_tokenizer):
    save_tokenizer(tmp_path, template)
    rendering = Rendering(str(tmp_path), "default")
    assert reason in rendering.refusal
    assert rendering.bridge(rendering.render(NEW, []), encode("Hi.<|im_end|>"), NEW, []) is None


def test_a_tokenizer_without_a_stop_token_is_refused(tmp_path, save_tokenizer):
    save_tokenizer(tmp_path, PLAIN)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    rendering = Rendering(str(tmp_path), "default")
    assert rendering.stop_token_ids() == []
    assert "does not end an assistant's turn with a stop token" in rendering.refusal


def test_a_renderer_that_knows_its_model_has_no_refusal(tokenizer_folder):
    assert Rendering(str(tokenizer_folder)).refusal is None
