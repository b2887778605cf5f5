import json

import pytest


@pytest.fixture
def tasks(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"id": "t", "instruction": "Say it.", "evaluate": ["sh", "-c", "cat answer.txt"]}))
    return path


@pytest.fixture
def preset(tmp_path):
    def preset(command):
        path = tmp_path / "harness.toml"
        program, *headless = map(json.dumps, command)
        path.write_text(f'name = "x"\nversion = "1"\nprogram = {program}\nheadless = [{", ".join(headless)}]\n')
        return path

    return preset
