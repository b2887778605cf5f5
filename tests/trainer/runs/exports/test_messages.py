import json
import logging

import pytest
from datasets import Json, List, Value, load_dataset

from rolltap.trainer.runs.exports.messages import export, session_conversations
from tests.trainer.runs.exports import recording
from tests.trainer.runs.exports.recording import SYSTEM, Recording, says, user, write


def lines(made):
    return session_conversations(made.recorded())[0]


@pytest.fixture
def load(tmp_path):
    """Return a function that exports recordings and loads the result."""

    def load(*recordings):
        run = write(tmp_path / "run", *recordings)
        (out := tmp_path / "out").mkdir()
        export(run, out, lambda *_: None)
        return load_dataset(str(out), split="train")

    return load


class TestSessionConversations:
    def test_a_leaf_has_its_whole_conversation_and_labels(self):
        (line,) = lines(recording.turns_with_tools())
        _, _, asks, _, answers = messages = line.pop("messages")
        roles = [message["role"] for message in messages]
        assert roles == ["system", "user", "assistant", "tool", "assistant"]
        assert asks["reasoning_content"] == "I look."
        assert asks["tool_calls"][0]["function"]["arguments"] == {"command": "ls"}
        assert answers == says("a.txt")
        assert json.loads(line.pop("tools")) == [recording.BASH]
        assert line == {
            "context": [],
            "session_id": "s",
            "task_id": "task",
            "group_id": "group",
            "harness": "pi",
            "reward": 1.0,
            "role": "agent",
            "finish_reason": "stop",
            "left_out": "",
            "malformed": False,
            "call_ids": ["c0", "c1"],
        }

    @pytest.mark.parametrize(
        ("case", "leaves"),
        [
            (recording.side_question, {"c1": "auxiliary", "c2": ""}),
            (recording.subagent, {"c2": "", "c3": ""}),
            (recording.compaction, {"c2": "", "c4": ""}),
            (recording.superseded_retry, {"c1": "superseded", "c3": ""}),
            (recording.superseded_by_an_aborted_line, {"c1": "superseded", "c2": ""}),
            (recording.aborted, {"c0": ""}),
            (recording.without_logprobs, {"c0": "missing_logprobs"}),
            (recording.unrewarded, {"c0": "no_reward", "c1": "auxiliary"}),
        ],
    )
    def test_there_is_a_line_for_each_leaf(self, case, leaves):
        assert {line["call_ids"][-1]: line["left_out"] for line in lines(case())} == leaves

    def test_assistant_messages_that_no_call_sampled_are_named(self):
        made = Recording()
        first = made.ask(SYSTEM, user("A?"), says("Written."), user("B?"), reply=says("Sampled."))
        made.ask(says("Added."), user("C?"), reply=says("Last."), after=first)
        (line,) = lines(made)
        context = [line["messages"][place]["content"] for place in line["context"]]
        assert context == ["Written.", "Added."]

    def test_an_incomplete_conversation_has_no_line(self):
        written, faults = session_conversations(recording.missing_ancestor().recorded())
        assert written == []
        assert faults == {"c1": "its parent c0 is not in the run"}

    def test_arguments_that_are_no_object_are_marked(self):
        (line,) = lines(recording.malformed_arguments())
        assert line["malformed"]
        assert line["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"command": ls'

    def test_without_tools_and_without_a_row_nothing_but_the_reward_is_null(self):
        made = recording.only_side_questions()
        made.session = None
        (line,) = lines(made)
        assert [name for name, value in line.items() if value is None] == ["reward"]
        assert line["tools"] == "null"


class TestExport:
    def test_datasets_gives_back_what_was_recorded(self, load):
        made = recording.turns_with_tools()
        dataset = load(made)
        lists = {"messages": Json(), "context": Value("int64"), "call_ids": Value("string")}
        types = {"reward": Value("float64"), "malformed": Value("bool")}
        types |= {name: List(kind) for name, kind in lists.items()}
        for name, kind in dataset.features.items():
            assert kind == types.get(name, Value("string")), name
        assert list(dataset) == lines(made)

    def test_types_do_not_depend_on_the_first_lines(self, load):
        # the loader infers types from the first 10 MB
        plain = Recording("plain", reward=None)
        plain.ask(user("x" * (11 << 20)), tools=())
        _, second = load(plain, recording.turns_with_tools())
        asks = second["messages"][2]
        assert asks["tool_calls"][0]["function"]["arguments"] == {"command": "ls"}
        assert second["reward"] == 1.0

    def test_the_file_alone_can_be_loaded(self, load, tmp_path):
        plain = Recording("plain")
        plain.ask(user("Hello"), tools=())
        malformed = Recording("malformed")
        malformed.ask(user("Go."), reply=says("", calls={1: '{"command": ls'}))
        expected = list(load(plain, recording.turns_with_tools(), malformed))
        files = str(tmp_path / "out" / "*.jsonl")
        assert list(load_dataset("json", data_files=files, split="train")) == expected

    def test_conversations_that_are_left_out_are_counted(self, tmp_path, caplog):
        run = write(tmp_path / "run", recording.missing_ancestor())
        (out := tmp_path / "out").mkdir()
        with caplog.at_level(logging.WARNING):
            assert export(run, out, lambda *_: None) == 0
        assert "1 conversations are left out" in caplog.text


def test_trl_renders_the_conversation_as_the_model_saw_it(load, tokenizer, tmp_path):
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl import SFTConfig, SFTTrainer

    made = Recording()
    first = made.ask(SYSTEM, user("List."), reply=says("", calls={1: '{"command": "ls"}'}))
    made.ask(recording.tool(1, "a.txt"), reply=says("a.txt"), after=first)
    here = {"report_to": "none", "use_cpu": True, "bf16": False, "activation_checkpointing": False}
    size = dict.fromkeys(["hidden_size", "intermediate_size", "head_dim"], 8)
    size |= dict.fromkeys(["num_hidden_layers", "num_attention_heads", "num_key_value_heads"], 1)
    trainer = SFTTrainer(
        Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **size)),
        args=SFTConfig(str(tmp_path / "sft"), max_length=None, **here),
        train_dataset=load(made),
        processing_class=tokenizer,
    )
    (line,) = lines(made)
    text = tokenizer.decode(trainer.train_dataset[0]["input_ids"])
    seen = {"tools": [recording.BASH], "tokenize": False}
    assert text == tokenizer.apply_chat_template(line["messages"], **seen)
    assert '"arguments": {"command": "ls"}' in text
