import json
import socket
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.dialects import routes
from rolltap.addons.dialects.call import message_tool_call
from rolltap.addons.dialects.fields import parse_object
from rolltap.addons.dialects.tools import function_tool
from rolltap.addons.prompts.rendering import InputError, Rendering
from rolltap.addons.prompts.tokenizer import CachingTokenizer, resolve_model
from tests.addons.conftest import TEMPLATE
from tests.addons.harness import user
from tests.addons.prompts.talks import continued, said
from tests.deep import examples

USER = user()


class TestChoice:
    def test_auto_finds_the_renderer_that_agrees_with_the_template_and_one_can_be_named(
        self, rendering, tokenizer_folder
    ):
        assert rendering.name == Rendering(str(tokenizer_folder), "qwen3").name == "qwen3"

    def test_a_template_that_no_renderer_agrees_with_is_used_itself(self, tmp_path, save_tokenizer):
        turns = (
            "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        )
        rendering = Rendering(save_tokenizer(tmp_path, turns + "assistant:"))
        assert rendering.name == "default"
        ids = rendering.render([USER], [])
        assert rendering.tokenizer.decode(ids) == "user: Hello\nassistant:"
        assert continued(rendering, ids, rendering.tokenizer.encode(" Hi"), [USER]) is None

    @pytest.mark.parametrize("renderer", ["qwen4", "gpt-oss"], ids=["unknown", "of another family"])
    def test_a_wrong_name_is_refused(self, tokenizer_folder, renderer):
        with pytest.raises(InputError, match=f"cannot use the renderer '{renderer}' with"):
            Rendering(str(tokenizer_folder), renderer)

    def test_a_folder_without_a_tokenizer_is_refused(self, tmp_path):
        with pytest.raises(InputError, match=r"it has no tokenizer, such as tokenizer\.json"):
            Rendering(str(tmp_path))
        (tmp_path / "tokenizer.json").write_text("{")
        with pytest.raises(InputError, match="cannot load a tokenizer from"):
            Rendering(str(tmp_path))

    def test_a_name_that_is_no_folder_and_not_on_the_hub_is_refused(self):
        with pytest.raises(InputError, match="there is no folder a b/c, and it is no name"):
            Rendering("a b/c")

    def test_a_hub_that_does_not_answer_is_waited_for_once(self, monkeypatch):
        monkeypatch.setattr("rolltap.addons.prompts.tokenizer._HUB_SECONDS", 0.05)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", f"http://127.0.0.1:{port}")
            with pytest.raises(InputError, match="the Hugging Face Hub does not answer"):
                Rendering("models/none")
            silent.accept()[0].close()
            silent.setblocking(False)
            with pytest.raises(BlockingIOError):
                silent.accept()

    def test_a_model_without_a_chat_template_is_refused(self, tmp_path, save_tokenizer):
        model = save_tokenizer(tmp_path, None)
        with pytest.raises(InputError, match="has no chat template"):
            Rendering(model)

    def test_digests_tell_tokenizers_and_templates_apart(self, rendering, tmp_path, save_tokenizer):
        other = Rendering(save_tokenizer(tmp_path, TEMPLATE.read_text() + "{# edited #}"), "qwen3")
        same = rendering.digests.items() & other.digests.items()
        assert [name for name, _ in same] == ["tokenizer_sha256"]


def test_a_folder_becomes_absolute_and_a_name_stays(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("model") == str(tmp_path / "model")
    assert resolve_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


STRICT = TEMPLATE.read_text().replace(
    "{%- for message in messages %}",
    "{%- for message in messages %}{%- if message.role == 'system' and not loop.first %}"
    "{{- raise_exception('System message must be at the beginning.') }}{%- endif %}",
)


class TestSystemMessages:
    """System messages can be anywhere in a conversation. Some templates take them only at the
    beginning."""

    CONVERSATION = (
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "Be kind."},
        USER,
        said("Hi."),
        {"role": "system", "content": "It is late."},
    )

    def written(self, rendering):
        return rendering.tokenizer.decode(rendering.render(list(self.CONVERSATION), []))

    def test_a_template_that_takes_them_anywhere_gets_them_there(self, rendering):
        assert "<|im_start|>system\nIt is late.<|im_end|>" in self.written(rendering)

    def test_a_template_that_takes_only_the_first_gets_joined_leading_ones_and_later_ones_as_users(
        self, tmp_path, save_tokenizer
    ):
        assert TEMPLATE.read_text() != STRICT
        text = self.written(Rendering(save_tokenizer(tmp_path, STRICT), "default"))
        assert "<|im_start|>system\nBe brief.\n\nBe kind.<|im_end|>" in text
        assert "<|im_start|>user\nIt is late.<|im_end|>" in text

    def test_the_call_id_is_not_rendered(self, rendering):
        whole = rendering.render([USER, said("Hi.")], [])
        assert rendering.render([USER, {**said("Hi."), "call_id": "c"}], []) == whole


LONG = "Hello " * 1_400_000
LONG_CALL = {"function": {"name": "f", "arguments": {"a": "Hi " * 10**6}}}


class TestLeastTokens:
    """A prompt that cannot fit is found before it is rendered."""

    @given(
        st.lists(
            st.text() | st.sampled_from(["<|im_end|>", " " * 300, "a" * 70_000, "é " * 40_000]),
            min_size=1,
            max_size=5,
        ),
        st.integers(1, 200),
    )
    @examples(30)
    def test_it_is_a_lower_bound(self, rendering, texts, limit):
        messages = [user(text) for text in texts]
        assert rendering.least_tokens(messages, [], limit) <= len(rendering.render(messages, []))

    @pytest.mark.parametrize(
        ("messages", "tools"),
        [
            ([user(LONG)], []),
            ([user("Hello " * 30)] * 60_000, []),
            ([user("")] * 200_000, []),
            ([{**said(""), "reasoning_content": LONG}], []),
            ([{**said(""), "tool_calls": [LONG_CALL]}], []),
            ([USER], [{"function": {"name": "look", "description": "Looks. " * 10**6}}]),
        ],
        ids=["one message", "many messages", "empty messages", "reasoning", "arguments", "tools"],
    )
    def test_counting_ends_beyond_the_limit(self, rendering, messages, tools):
        count = CachingTokenizer.count
        with mock.patch.object(
            CachingTokenizer, "count", autospec=True, side_effect=count
        ) as counted:
            assert rendering.least_tokens(messages, tools, 65_536) > 65_536
        lengths = [len(call.args[1]) for call in counted.call_args_list]
        assert sum(lengths) < 10 * 65_536

    def test_a_prompt_that_may_fit_is_not_counted(self, rendering):
        with mock.patch.object(CachingTokenizer, "count", None):
            assert rendering.least_tokens([user("Hello " * 10_000)], [], 65_536) <= 10_000


class TestBridge:
    @pytest.mark.parametrize("new", [[USER], [USER, said("Hi."), USER]])
    @pytest.mark.parametrize(
        "completion", ["Hi.<|im_end|>Hi", "<think>\nI<|im_end|>"], ids=["after the end", "open"]
    )
    def test_it_returns_none_when_it_would_change_tokens(self, rendering, encode, completion, new):
        prompt = rendering.render([USER], [])
        assert continued(rendering, prompt, encode(completion), new) is None

    def test_earlier_reasoning_stays_when_the_user_speaks_again(self, rendering, encode):
        completion = encode("<think>\nI think.\n</think>\n\nHi.<|im_end|>")
        assert continued(rendering, rendering.render([USER], []), completion, [USER])


class TestParse:
    def parse(self, rendering, encode, text):
        return rendering.read(rendering.render([USER], []), encode(text + "<|im_end|>"), [])[0]

    @pytest.mark.parametrize(
        "value",
        ["1" * 5000, "[" * 100_000],
        ids=["an integer of thousands of digits", "brackets without end"],
    )
    def test_json_that_python_refuses_to_parse_is_text(self, rendering, encode, value):
        text = f'<tool_call>\n{{"name": "look", "arguments": {value}}}\n</tool_call>'
        assert self.parse(rendering, encode, text).content == text

    def test_a_lone_surrogate_is_replaced(self, rendering, encode):
        text = r'<tool_call>{"name": "look", "arguments": {"at": "\ud83d"}}</tool_call>'
        (made,) = self.parse(rendering, encode, text).tool_calls
        assert made.arguments == '{"at": "\ufffd"}'

    def test_a_turn_ends_with_its_stop_token(self, rendering, encode):
        assert set(rendering.stop_token_ids) == {*encode("<|im_end|>"), *encode("<|endoftext|>")}


FAMILY_TOKENS = {
    "gemma4": (
        "<bos> <eos> <|turn> <turn|> <|channel> <channel|> <|think|> <|tool> <tool|> <|tool_call>"
        " <tool_call|> <|tool_response> <tool_response|> <|image> <|image|> <image|>"
    ),
    "inkling": (
        "<|message_user|> <|message_model|> <|message_system|> <|message_tool|> <|content_text|>"
        " <|content_thinking|> <|content_image|> <|content_audio_input|> <|content_xml|>"
        " <|content_invoke_tool_json|> <|content_invoke_tool_text|> <|content_model_end_sampling|>"
        " <|end_message|> <|audio_end|> <|unused_200054|> <|unused_200053|>"
    ),
    "kimi-k2": (
        "<|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|tool_calls_section_begin|>"
        " <|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|>"
        " <|tool_call_end|>"
    ),
}
"""Renderer -> its special tokens that the test's tokenizer lacks."""
CALLS = {"c1": "look", "c2": "listen"}
TOOLS = [function_tool(name, "", {"type": "object"}) for name in CALLS.values()]


@pytest.mark.parametrize("renderer", FAMILY_TOKENS)
def test_a_continued_prompt_gives_each_result_the_name_of_its_tool(
    renderer, tmp_path, save_tokenizer
):
    made = [message_tool_call(i, name, "{}") for i, name in CALLS.items()]
    asked = [user("Look."), {"role": "assistant", "content": None, "tool_calls": made}]
    results = []
    for call_id in ("c2", "c1"):
        results.append({"role": "tool", "tool_call_id": call_id, "content": f"{CALLS[call_id]}ed"})
    body = {"messages": [*asked, *results], "tools": TOOLS}
    call = routes.CHAT.decode(parse_object(json.dumps(body).encode()), "/v1/chat/completions")
    rendering = Rendering(save_tokenizer(tmp_path, "", FAMILY_TOKENS[renderer].split()), renderer)
    prompt = rendering.render(call.messages[:1], call.tools)
    whole = rendering.render(call.messages, call.tools)
    assert whole[: len(prompt)] == prompt
    end = len(prompt)
    while whole[end] not in rendering.stop_token_ids:
        end += 1
    completion = whole[len(prompt) : end + 1]
    assert continued(rendering, prompt, completion, call.messages[2:], call.tools) == whole
