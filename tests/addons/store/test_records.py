import math

import pytest

from rolltap.addons.store.records import SENTINEL_LOGPROB, VersionSpan, find_violation


def spans(*places):
    return [
        VersionSpan(version=str(number), start=start, end=end)
        for number, (start, end) in enumerate(places)
    ]


class TestFindViolation:
    @pytest.mark.parametrize(
        ("completion_ids", "logprobs", "versions"),
        [
            ([7, 8], [-0.5, 0.0], spans((0, 2))),
            ([7], [-9998.9], spans((0, 1))),
            ([7, 8, 9], [-0.5] * 3, spans((0, 1), (1, 3))),
            ([], [], []),
        ],
        ids=[
            "probability one is allowed",
            "very unlikely",
            "weights changed within the call",
            "nothing sampled",
        ],
    )
    def test_sound_tokens_have_none(self, completion_ids, logprobs, versions):
        assert find_violation(completion_ids, logprobs, versions) is None

    @pytest.mark.parametrize(
        ("logprobs", "places", "words"),
        [
            ([-0.5], [(0, 2)], "2 token ids but 1 log-probabilities"),
            ([-0.5] * 3, [(0, 2)], "2 token ids but 3 log-probabilities"),
            ([-0.5, math.nan], [(0, 2)], "log-probability 1 is nan"),
            ([-math.inf, -0.5], [(0, 2)], "log-probability 0 is -inf"),
            ([-0.5, 0.01], [(0, 2)], "log-probability 1 is positive"),
            ([SENTINEL_LOGPROB, -0.5], [(0, 2)], "log-probability 0 is the sentinel"),
            ([-0.5] * 2, [], "cover 0 of 2 tokens"),
            ([-0.5] * 2, [(0, 1)], "cover 1 of 2 tokens"),
            ([-0.5] * 2, [(0, 3)], "cover 3 of 2 tokens"),
            ([-0.5] * 2, [(1, 2)], "leave token 0 out"),
            ([-0.5] * 2, [(0, 1), (0, 2)], "leave token 1 out"),
            ([-0.5] * 2, [(0, 2), (2, 1)], "leave token 2 out"),
        ],
    )
    def test_unsound_logprobs_and_weight_versions_are_named(self, logprobs, places, words):
        assert words in find_violation([7, 8], logprobs, spans(*places))

    @pytest.mark.parametrize(
        ("ids", "bounds", "words"),
        [
            ([7, -1], {}, "token 1 is -1, which is not in the vocabulary"),
            ([7, 8], {"vocabulary": 8}, "token 1 is 8, which is not in the vocabulary"),
            ([7, 8], {"asked": 1}, "2 token ids where at most 1 were asked"),
            ([7, 8], {"asked": 2, "vocabulary": 9}, None),
        ],
    )
    def test_so_are_tokens_that_nobody_asked_for(self, ids, bounds, words):
        assert find_violation(ids, [-0.5] * 2, spans((0, 2)), **bounds) == words
