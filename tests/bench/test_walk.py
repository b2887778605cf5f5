"""The files that a reader of one call has to know."""

import pytest

from tests.bench.walk import walk

MOST_FILES = 33
"""Files of `addons` that a streamed, continued Chat call visits. Whoever makes them fewer lowers
it."""


@pytest.fixture
def found(tmp_path, scripted_engine, tokenizer_folder):
    return walk(tmp_path, scripted_engine, tokenizer_folder)


def test_a_call_visits_few_files_from_the_proxy_to_the_store(found):
    assert len(found.files) <= MOST_FILES, found.files
    folders = {file.partition("/")[0] for file in found.files}
    assert folders >= {"proxy", "dialects", "endpoint", "prompts", "engine", "store"}


def test_a_hop_is_a_call_from_one_file_to_another(found):
    assert ("endpoint/generation.py", "engine/pool.py") in found.hops
    assert all(
        caller != callee and {caller, callee} <= {*found.files} for caller, callee in found.hops
    )
