"""Messages of the assistant that no call sampled, from the request to the trace."""

from rolltap.trainer.doctor.scripted_engine import Say
from rolltap.trainer.traces.build import build_traces
from rolltap.trainer.traces.conversations import rebuild_conversations
from rolltap.trainer.traces.reader import RecordedCalls
from tests.addons.harness import user

NOTIFICATION = {"role": "assistant", "content": "Job 1 has ended."}


async def test_a_notification_is_part_of_the_prompt_and_not_trained(harness, scripted_engine):
    scripted_engine.replies += [Say("Hello."), Say("Well.")]
    _, body = await harness.ask(user())
    conversation = [user(), body["choices"][0]["message"], user("Go on"), NOTIFICATION, user("And?")]
    await harness.ask(*conversation)
    (calls,) = RecordedCalls(harness.run).values()
    first, second = sorted(calls, key=lambda call: len(call.prompt_ids))
    assert (second.kind, second.parent_id, second.role) == ("bridged", first.call_id, "agent")
    (trace,), ledger = build_traces(calls)
    sampled = [token for token, kept in zip(trace.completion_ids, trace.completion_mask, strict=True) if kept]
    assert sampled == [*first.completion_ids, *second.completion_ids]
    assert ledger.trained == ledger.sampled
    rebuilt = rebuild_conversations([first, second])[1]
    assert [message["content"] for message in rebuilt.messages()] == [m["content"] for m in conversation]


async def test_a_session_that_begins_with_examples_has_a_root(harness, scripted_engine):
    scripted_engine.replies += [Say("4"), Say("6")]
    messages = [user("1 + 1?"), {"role": "assistant", "content": "2"}, user("2 + 2?")]
    _, body = await harness.ask(*messages)
    await harness.ask(*messages, body["choices"][0]["message"], user("3 + 3?"))
    assert [(call["kind"], call["role"]) for call in harness.calls()] == [("root", "agent"), ("bridged", "agent")]
