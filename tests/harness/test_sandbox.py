"""The real programs in the sandbox: they start, use their tools, and reach the recorder and nothing
else."""

from functools import partial

import pytest

from rolltap.addons.store.tables import read_rows
from rolltap.trainer.boxes.environment import clean_environment
from rolltap.trainer.boxes.runtime import BoxSpec, Ended, Mount
from rolltap.trainer.boxes.sandbox import SandboxRuntime
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.recorder import Recorder
from tests.boxes import sandboxed
from tests.deep import DEEP
from tests.harness.play import installed
from tests.harness.test_harnesses import INSTRUCTION, greeting

pytestmark = [pytest.mark.harness, sandboxed]

SHORT = ("codex", "mini-swe-agent", "pi")
"""A native program, one on Python and one on Node. The others are the same to the sandbox."""


@pytest.mark.parametrize("name", [name for name in Harness.names() if DEEP or name in SHORT])
async def test_a_harness_works_in_the_sandbox(
    name, lead, scripted_engine, tokenizer_folder, tmp_path, workspace, home
):
    harness = installed(name)
    lead(greeting(name))
    log = tmp_path / "log"
    with Recorder(tmp_path / "run", engine=scripted_engine.url, model=tokenizer_folder) as recorder:
        outside = recorder.environment("s1")
        address = outside["HTTPS_PROXY"].rpartition("@")[2]
        files = {
            outside["NODE_EXTRA_CA_CERTS"]: "/etc/rolltap/ca.pem",
            outside["SSL_CERT_FILE"]: "/etc/rolltap/ca-bundle.pem",
        }
        spec = BoxSpec(
            name="s1",
            workspace=workspace,
            workdir="/workspace",
            home=home,
            proxy=address,
            accept=partial(recorder.accept, "s1"),
            mounts=[Mount(source=source, target=target) for source, target in files.items()],
        )
        async with SandboxRuntime().box(spec) as box:
            inside = {
                key: files.get(value, value.replace(address, box.proxy))
                for key, value in outside.items()
            }
            env = {
                **clean_environment(home),
                **harness.environment(scripted_engine.url),
                **inside,
                "HOME": box.home,
            }
            ended = await box.run(harness.command_for(INSTRUCTION), env=env, timeout=1200, log=log)
    assert ended == Ended(0), log.read_text()
    assert "héllo" in (workspace / "greeting.txt").read_text()
    assert {call["status"] for call in read_rows(tmp_path / "run", "calls")} == {"completed"}
