import json

from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.records import Call, Session, VersionSpan
from rolltap.addons.store.tables import RunWriter
from tests.trainer.cli.program import rolltap


def test_inspect_shows_rewards_and_the_ledger(tmp_path):
    write_metadata(tmp_path, {})
    writer = RunWriter(tmp_path)
    for i, reward in enumerate([0.0, 1.0, None]):
        writer.add_call(
            Call(
                session_id=f"s{i}",
                call_id=f"c{i}",
                prompt_ids=[1],
                completion_ids=[2, 3],
                logprobs=[-0.5, -0.5],
                weight_versions=[VersionSpan(version="4", start=0, end=2)],
            )
        )
        writer.add_session(
            Session(
                session_id=f"s{i}",
                task_id="t",
                group_id="g",
                harness="h",
                status="completed",
                exit_status=0,
                reward=reward,
                policy_version="4",
            )
        )
    writer.close()
    summary = json.loads(rolltap("inspect", tmp_path, "--json").stdout)
    assert summary["ledger"] == {"sampled": 6, "trained": 4, "left_out": {"no_reward": 2}}
    assert summary["steps"] == [{"policy_version": "4", "sessions": 3, "mean_reward": 0.5, "best_reward": 1.0}]
    table = rolltap("inspect", tmp_path).stdout
    assert "left out: no_reward" in table
    assert "0.500" in table
