import os

import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.process import ProcessRuntime
from rolltap.trainer.boxes.runtime import Ended
from rolltap.trainer.tasks.task import Limits
from tests.boxes import spec_in


async def test_a_program_runs_in_the_workspace_and_reaches_the_recorder_itself(tmp_path):
    async with ProcessRuntime().box(spec_in(tmp_path, proxy="127.0.0.1:8080")) as box:
        folders = (str(tmp_path / "workspace"), str(tmp_path / "home"))
        assert (box.workdir, box.home, box.proxy) == (*folders, "127.0.0.1:8080")
        ended = await box.run(
            ["sh", "-c", "pwd; exit 3"], env=dict(os.environ), timeout=60, log=tmp_path / "log"
        )
        await box.settle()
    assert ended == Ended(3)
    assert (tmp_path / "log").read_text() == f"{tmp_path}/workspace\n"


async def test_limits_hold_without_isolation(tmp_path):
    async with ProcessRuntime().box(spec_in(tmp_path, limits=Limits(processes=20))) as box:
        script = "for i in $(seq 40); do sleep 600 & done; wait"
        ended = await box.run(
            ["sh", "-c", script], env=dict(os.environ), timeout=60, log=tmp_path / "log"
        )
    assert ended == Ended(None, "processes")


async def test_an_image_is_refused_and_the_warning_says_what_it_does_not_protect_from(tmp_path):
    assert "all rights of this user" in ProcessRuntime().warning
    with pytest.raises(InputError, match=r"process has no images, and the task needs debian:12"):
        async with ProcessRuntime().box(spec_in(tmp_path, image="debian:12")):
            pass
