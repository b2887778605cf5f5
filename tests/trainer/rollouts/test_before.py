"""Checks of the engines before the first session."""

import logging

import pytest

from rolltap.addons.errors import EngineError, InputError
from rolltap.trainer.doctor.scripted_engine import ScriptedEngine
from rolltap.trainer.rollouts.check import check_engines, check_judges
from rolltap.trainer.tasks.task import Task


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, "rolltap")
    return caplog


def test_an_engine_that_serves_the_model_is_asked_for_its_weights(scripted_engine, warnings):
    scripted_engine.weight_version = "1a2b3c4d.3.0"
    assert check_engines(scripted_engine.url, scripted_engine.root) == "1a2b3c4d.3.0"
    assert not warnings.messages


def test_an_engine_that_does_not_answer_is_an_error(scripted_engine):
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9/v1/models: no engine answers"):
        check_engines(f"{scripted_engine.url}, http://127.0.0.1:9", scripted_engine.root)


def test_an_engine_without_a_window_is_an_error(scripted_engine):
    scripted_engine.max_model_len = 0
    with pytest.raises(EngineError, match="has a context window of 0 tokens"):
        check_engines(scripted_engine.url, scripted_engine.root)


def test_another_model_weights_without_a_name_and_different_weights_are_named(scripted_engine, tokenizer, warnings):
    scripted_engine.weight_version = None
    with ScriptedEngine(tokenizer) as other:
        assert check_engines(f"{scripted_engine.url},{other.url}", "org/model") == "default,unknown"
    assert [
        sum("the recorder's model is org/model" in line for line in warnings.messages),
        sum("does not tell which weights it serves" in line for line in warnings.messages),
        sum("the engines serve different weights" in line for line in warnings.messages),
    ] == [2, 1, 1]


def test_a_judge_that_cannot_judge_is_an_error_that_names_its_task():
    judge = {"kind": "llm", "rubric": "Is it good?", "url": "http://127.0.0.1:9/v1", "model": "m", "key_env": "NO_KEY"}
    tasks = [Task(id="good", instruction="go", evaluate=["true"]), Task(id="bad", instruction="go", judge=judge)]
    with pytest.raises(InputError, match=r"bad.*key_env"):
        check_judges(tasks, "http://127.0.0.1:8")
