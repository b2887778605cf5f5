"""Attacks with long texts: no session's prompt and no session's reply stops the others."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from rolltap.trainer.doctor.scripted_engine import Say
from tests.recorder_process import CHAT, HELLO

LONG = {
    "words": "The quick brown fox jumps over the lazy dog. " * 180_000,
    "one word": "abcdefghij" * 800_000,
    "characters of several code points": "a" + "\u0301\u0323" * 1_000_000,
    "special tokens": "<|im_end|>" * 800_000,
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_a_prompt_of_8_mb_is_refused_while_other_sessions_are_answered(start, scripted_engine, text):
    scripted_engine.otherwise = lambda request: Say("Hi.")
    recorder = start()
    long = {"model": "m", "messages": [{"role": "user", "content": text}]}
    with recorder.client("s1") as attacker, recorder.client("s2") as other, ThreadPoolExecutor() as threads:
        other.timeout = 10
        attacks = [threads.submit(attacker.post, CHAT, json=long) for _ in range(3)]
        while not all(attack.done() for attack in attacks):
            assert other.post(CHAT, json=HELLO).status_code == 200
        assert other.post(CHAT, json=HELLO).status_code == 200
    assert {attack.result().status_code for attack in attacks} <= {400, 413}
    assert all(call["session_id"] == "s2" for call in recorder.rows("calls"))


def test_a_prompt_of_many_messages_is_refused_while_other_sessions_are_answered(start, scripted_engine):
    scripted_engine.otherwise = lambda request: Say("Hi.")
    recorder = start()
    many = {"model": "m", "messages": [{"role": "system", "content": ""}] * 200_000}
    with recorder.client("s1") as attacker, recorder.client("s2") as other, ThreadPoolExecutor() as threads:
        other.timeout = 10
        attack = threads.submit(attacker.post, CHAT, json=many)
        assert other.post(CHAT, json=HELLO).status_code == 200
    assert attack.result().status_code in (400, 413)
