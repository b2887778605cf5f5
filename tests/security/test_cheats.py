"""Cheats of agents' programs that a judge runs, and of new files that a judge's programs would take as its own."""

import pytest

from rolltap.trainer.rollouts.runtimes.sandbox import SandboxRuntime
from tests.boxes import sandboxed
from tests.deep import cases
from tests.trainer.rollouts.judges.sessions import Left, shell, write

LINKS = {
    "to a file that the judge lays": {"out.txt": "tests/hidden.txt"},
    "to a folder that the judge lays": {"mine": "tests", "out.txt": "mine/hidden.txt"},
    "through a link of the start": {"out.txt": "old/hidden.txt"},
    "to the workspace": {"here": ".", "out.txt": "here/tests/hidden.txt"},
}


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize("how", LINKS)
async def test_a_link_to_what_the_judge_lays_out_is_not_applied(tmp_path, how, planted):
    write(tmp_path / "hidden", {"tests/hidden.txt": "42\n"})
    left = Left(tmp_path, {"main.sh": "", "data.txt": "1\n"})
    for folder in (left.start.folder, left.workspace):
        (folder / "old").symlink_to("tests")
    left.do({"tests/hidden.txt": "mine\n"} if planted else {})
    for name, target in LINKS[how].items():
        (left.workspace / name).symlink_to(target)
    (left.workspace / "data").symlink_to("data.txt")
    spec = shell("cmp data data.txt && cmp out.txt tests/hidden.txt || exit 1", tests=str(tmp_path / "hidden"))
    judged = await left.judge({**spec, "paths": ["**"]})
    assert judged.reward == 0.0, left.log
    assert "out.txt: symlink" in judged.evidence["refused"]
    assert "data: symlink" not in judged.evidence["refused"]
    (left.workspace / "out.txt").unlink()
    left.do({"out.txt": "42\n"})
    assert (await left.judge({**spec, "paths": ["**"]})).reward == 1.0, left.log
