"""Values that are made once, however many ask."""

import asyncio

import pytest

from rolltap.trainer.concurrency import Once


async def test_those_who_ask_together_get_one_value_and_other_keys_do_not_wait():
    once, made, blocked = Once(), [], asyncio.Event()

    async def make(key):
        made.append(key)
        if key == "slow":
            await blocked.wait()
        return key.upper()

    slow = [asyncio.create_task(once.get("slow", lambda: make("slow"))) for _ in range(3)]
    await asyncio.sleep(0)
    assert await once.get("quick", lambda: make("quick")) == "QUICK"
    blocked.set()
    assert await asyncio.gather(*slow) == ["SLOW"] * 3
    assert made == ["slow", "quick"]


def test_a_failure_is_not_kept_and_the_next_who_asks_may_be_in_another_event_loop():
    once, answers = Once(), [OSError("full"), 7]

    async def make():
        await asyncio.sleep(0)
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    async def ask_three_times():
        return await asyncio.gather(*(once.get("a", make) for _ in range(3)), return_exceptions=True)

    first = asyncio.run(ask_three_times())
    assert [str(answer) for answer in first] == ["full", "7", "7"]
    assert asyncio.run(ask_three_times()) == [7, 7, 7]


async def test_those_who_wait_for_one_that_is_cancelled_make_the_value_themselves():
    once, started = Once(), asyncio.Event()

    async def never():
        started.set()
        await asyncio.Event().wait()

    async def make():
        return 7

    first = asyncio.create_task(once.get("a", never))
    await started.wait()
    second = asyncio.create_task(once.get("a", make))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == 7
    with pytest.raises(asyncio.CancelledError):
        await first
