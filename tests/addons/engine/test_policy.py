import json

import pytest

from rolltap.addons.engine.policy import POLICY_FILE, Policy, PolicyFile, SessionPolicy
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


class TestSession:
    @pytest.mark.parametrize("keep", [True, False])
    def test_keeps_the_first_adapter_if_it_is_told_to(self, tmp_path, keep):
        policy = SessionPolicy(PolicyFile(tmp_path), keep=keep)
        assert policy.choose() == Policy("default")
        publish(tmp_path, version="1", model="policy-1")
        assert policy.choose() == Policy("1", "policy-1")
        publish(tmp_path, version="2", model="policy-2")
        assert policy.choose() == (Policy("1", "policy-1") if keep else Policy("2", "policy-2"))

    def test_goes_on_with_the_published_policy_when_its_adapter_is_lost_and_keeps_that(self, tmp_path):
        policy = SessionPolicy(PolicyFile(tmp_path), keep=True)
        publish(tmp_path, version="1", model="policy-1")
        first = policy.choose()
        assert policy.lost(first) is None
        publish(tmp_path, version="2", model="policy-2")
        assert policy.lost(first) == policy.lost(first) == policy.choose() == Policy("2", "policy-2")
