from pathlib import Path

from tests.trainer.cli.program import rolltap


def test_the_addons_path_is_a_script_that_mitmdump_can_load():
    assert "addons = " in Path(rolltap("addon").stdout.strip()).read_text()
