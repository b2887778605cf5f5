"""Assistant messages that no call sampled are written into a continuation as a full prompt has them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.dialects.dialect import name_results
from rolltap.addons.dialects.model_call import assistant_message, message_tool_call
from rolltap.addons.prompts import rendering as module
from rolltap.addons.prompts.rendering import Rendering
from rolltap.addons.prompts.template_bridge import PLACEHOLDER, placeholder_turn, tokens_of_turns
from tests.addons.conftest import MARKUP, SPECIAL, TEMPLATE
from tests.addons.prompts.test_rendering import VISION
from tests.addons.prompts.test_template_bridge import PLAIN
from tests.deep import examples

USER = {"role": "user", "content": "Hello"}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}]
LOOK = message_tool_call("c1", "look", {"at": "é"})
RESULT = {"role": "tool", "content": "Nothing.", "tool_call_id": "c1", "name": "look"}
INVENTED = [assistant_message("", "", [LOOK]), RESULT]
TAILS = {
    "an answer": [USER, assistant_message("Hi.", "", []), USER],
    "a call and its result": [USER, *INVENTED],
    "a call after a result": [RESULT, *INVENTED],
    "a call immediately": [*INVENTED, USER],
    "reasoning": [USER, assistant_message("Hi.", "I greet.", []), USER],
    "several": [USER, *INVENTED, assistant_message("So.", "", [LOOK]), RESULT, assistant_message("Hi.", "", []), USER],
    "a system message": [{"role": "system", "content": "It is late."}, assistant_message("Yes.", "", []), USER],
    "the end": [USER, assistant_message("Hi.", "", [])],
}


@pytest.fixture(scope="module", params=[*sorted(module._READS_ONE_TURN), "template"])
def any_rendering(request, tmp_path_factory, save_tokenizer):
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "template":
        save_tokenizer(folder, PLAIN)
        return Rendering(str(folder), "default")
    save_tokenizer(folder, TEMPLATE.read_text(), VISION)
    return Rendering(str(folder), request.param)


@pytest.mark.parametrize("tools", [[], TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS)
def test_the_tokens_after_a_turn_are_those_of_a_full_prompt(any_rendering, encode, tail, tools):
    prompt = any_rendering.render([USER], tools)
    opened = prompt[-2:] == encode("<think>\n")
    turn = placeholder_turn("Hi.", tail)
    completion = encode(("I greet.\n</think>\n\n" if opened else "") + "Hi.<|im_end|>")
    whole = any_rendering.render(name_results([USER, turn, *tail]), tools)
    bridged = any_rendering.bridge(prompt, completion, tail, tools)
    assert bridged[: len(prompt) + len(completion)] == prompt + completion
    assert whole[-(len(bridged) - len(prompt) - len(completion)) :] == bridged[len(prompt) + len(completion) :]


@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS)
@pytest.mark.parametrize("completion", ["Hi.", "<think>\nI"], ids=["cut", "cut in its reasoning"])
def test_a_cut_turn_is_ended_as_for_other_messages(any_rendering, encode, completion, tail):
    prompt, sampled = any_rendering.render([USER], []), encode(completion)
    other = any_rendering.bridge(prompt, sampled, [USER], [])
    bridged = any_rendering.bridge(prompt, sampled, tail, [])
    end = len(prompt) + len(sampled) + 1
    assert bridged[:end] == other[:end]
    assert bridged[-3:] == any_rendering.render([USER, *tail], [])[-3:]


@pytest.mark.parametrize("completion", ["Hi.<|im_end|>Hi", "<think>\nI<|im_end|>"], ids=["after the end", "open"])
def test_a_turn_that_cannot_be_continued_is_not(rendering, encode, completion):
    tail = TAILS["an answer"]
    assert rendering.bridge(rendering.render([USER], []), encode(completion), tail, []) is None


pieces = st.sampled_from([*SPECIAL, *MARKUP, "<|im_start|>assistant\n", "<|im_end|>\n", "\n", "user\n", "Hi", " ", "é"])
texts = st.lists(pieces, max_size=6).map("".join)
messages = st.one_of(
    st.builds(lambda text: {"role": "user", "content": text}, texts),
    st.builds(lambda text: {**RESULT, "content": text}, texts),
    st.builds(assistant_message, texts, texts, st.sampled_from([[], [LOOK]])),
)


@given(prompt=texts, completion=texts, tail=st.lists(messages, min_size=1, max_size=5))
@examples(200)
def test_whatever_the_tail_no_sampled_token_changes(any_rendering, encode, prompt, completion, tail):
    prompt_ids, completion_ids = encode(prompt), encode(completion)
    ids = any_rendering.bridge(prompt_ids, completion_ids, tail, [])
    if ids is not None:
        sampled = len(prompt_ids) + len(completion_ids)
        assert ids[:sampled] == prompt_ids + completion_ids
        whole = any_rendering.render([USER, placeholder_turn("Hi.", tail), *tail], [])
        stop_ids = any_rendering.stop_token_ids()
        extension = ids[sampled:]
        if completion_ids[-1:] not in [[i] for i in stop_ids]:
            extension = extension[next(i for i, token in enumerate(extension) if token in stop_ids) + 1 :]
        assert whole[-len(extension) :] == extension


class TestTokensOfTurns:
    """With a renderer of letters: a turn of the assistant is `A...E`, where E ends it."""

    AFTER, HOW = [*b"uG"], ([*PLACEHOLDER.encode()], [ord("E")])

    def render(self, changed=lambda text: text):
        def ids(messages):
            turns = {"user": lambda m: "u", "assistant": lambda m: f"A{m['content']}E", "tool": lambda m: "t"}
            return [*changed("".join(turns[m["role"]](m) for m in messages) + "G").encode()]

        return ids

    def test_they_are_what_a_full_prompt_has_after_the_placeholder(self):
        tail = [USER, assistant_message("x", "", []), RESULT]
        assert tokens_of_turns(self.AFTER, True, tail, self.render(), *self.HOW) == [*b"uAxEtG"]
        assert tokens_of_turns([*b"E", *self.AFTER], False, tail, self.render(), *self.HOW) == [*b"EuAxEtG"]

    @pytest.mark.parametrize(
        "changed",
        [lambda text: text.replace("uG", "vG"), lambda text: text.replace("7E", "7") if "x" in text else text],
        ids=["other tokens after a turn", "a turn whose end depends on later ones"],
    )
    def test_there_are_none_when_the_placeholder_is_treated_otherwise(self, changed):
        tail = [assistant_message("x", "", []), USER]
        assert tokens_of_turns(self.AFTER, True, tail, self.render(changed), *self.HOW) is None

    def test_there_are_none_when_the_placeholder_is_not_found(self):
        assert tokens_of_turns(self.AFTER, True, [USER], lambda messages: [], *self.HOW) is None

    def test_what_is_written_before_the_placeholder_may_differ(self):
        render = self.render(lambda text: text.replace("Aa8", "A?a8") if "x" in text else text)
        tail = [assistant_message("x", "", []), USER]
        assert tokens_of_turns(self.AFTER, True, tail, render, *self.HOW) == [*b"AxEuG"]

    def test_there_are_none_for_messages_that_the_template_refuses(self):
        def refuse(messages):
            raise ValueError("no")

        assert tokens_of_turns(self.AFTER, True, [USER], refuse, *self.HOW) is None
