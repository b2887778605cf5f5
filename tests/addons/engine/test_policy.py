import json

from rolltap.addons.engine.policy import POLICY_FILE, Policy, PolicyFile
from rolltap.addons.store.staging import write_atomically


def publish(run, **policy):
    write_atomically(run / POLICY_FILE, json.dumps(policy))


def test_the_engines_own_weights_are_the_policy_before_anything_is_published(tmp_path):
    assert PolicyFile(tmp_path).read() == Policy("default", model=None)


def test_the_last_published_version_is_the_policy(tmp_path):
    policy = PolicyFile(tmp_path)
    policy.read()
    publish(tmp_path, version="1")
    assert policy.read() == policy.read() == Policy("1", model=None)
    publish(tmp_path, version=2, model="adapter-2")
    assert policy.read() == Policy("2", model="adapter-2")


def test_a_recorder_that_starts_later_reads_the_policy(tmp_path):
    publish(tmp_path, version="3", model=None)
    assert PolicyFile(tmp_path).read() == Policy("3")
