from typing import get_args

import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.choose import make_runtime
from rolltap.trainer.boxes.containers.find import find_engine
from rolltap.trainer.boxes.hiding import HidingRuntime
from rolltap.trainer.boxes.runtime import ImageRuntime
from rolltap.trainer.rollouts.config import RolloutConfig

HARBOR = {"harbor_python": "python", "harbor_environment": "daytona"}


@pytest.mark.parametrize("name", get_args(RolloutConfig.model_fields["runtime"].annotation))
def test_each_runtime_is_made_by_its_name_and_tools_are_folders(name, tmp_path):
    further = {
        "ssh": {"ssh": "machine"},
        "harbor": HARBOR,
    }
    tools = [tmp_path, str(tmp_path)] if name in ("sandbox", "container", "harbor") else ()
    runtime = make_runtime(name, tools=tools, **further.get(name, {}))
    assert runtime.name == name
    assert runtime.isolated is (name != "process")
    assert isinstance(runtime, HidingRuntime) is (name not in ("process", "ssh", "harbor"))


def test_boxes_behind_ssh_have_images_where_the_runtime_there_has_them():
    has_images = {}
    for kind in (None, "sandbox", "container", "apptainer"):
        runtime = make_runtime("ssh", ssh="machine", ssh_kind=kind)
        has_images[kind] = isinstance(runtime, ImageRuntime)
    assert has_images == {None: False, "sandbox": False, "container": True, "apptainer": True}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("process", {"tools": ["/opt"]}, "tools = .* has no meaning .*: remove it"),
        (
            "sandbox",
            {"container_engine": "podman"},
            "container_engine = 'podman' has no meaning .*: remove it",
        ),
        (
            "apptainer",
            {"container_arguments": ["-x"]},
            "container_arguments = .* has no meaning .*: remove it",
        ),
        ("process", {"build": True}, "build = True has no meaning .*: remove it"),
        ("ssh", {}, 'runtime = "ssh" needs a machine: --ssh USER@HOST'),
        (
            "ssh",
            {"ssh": "-oProxyCommand=x"},
            "ssh = '-oProxyCommand=x' is no machine.*--ssh USER@HOST",
        ),
        ("ssh", {"ssh": "machine", "build": True}, "build = True has no meaning .*: remove it"),
        (
            "ssh",
            {"ssh": "machine", "container_engine": "docker"},
            "no meaning .*ssh_kind = .sandbox.: remove it",
        ),
        ("sandbox", {"ssh": "machine"}, "ssh = 'machine' has no meaning .*: remove it"),
        ("container", {"ssh_kind": "sandbox"}, "ssh_kind = 'sandbox' has no meaning .*: remove it"),
        ("harbor", {}, 'runtime = "harbor" needs harbor_python .*and harbor_environment'),
        ("harbor", {"ssh": "machine"}, "ssh = 'machine' has no meaning .*: remove it"),
        (
            "harbor",
            {**HARBOR, "harbor_environment": "/no/such.json"},
            "/no/such.json, which cannot be read",
        ),
        ("sandbox", HARBOR, "harbor_python = .* has no meaning .*: remove it"),
        (
            "sandbox",
            {"recorder_address": "a:1"},
            "recorder_address = 'a:1' has no meaning .*: remove it",
        ),
        (
            "sandbox",
            {"tools": ["/no/such"]},
            'tools names "/no/such", which is no folder: write the folder',
        ),
    ],
)
def test_a_wrong_name_or_setting_is_named_with_the_fix(name, settings, message):
    with pytest.raises(InputError, match=message):
        make_runtime(name, **settings)


def test_the_engine_of_containers_is_the_first_that_is_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    find_engine.cache_clear()
    with pytest.raises(InputError, match="podman is not installed: apt-get install podman runc"):
        make_runtime("container").check()
    (tmp_path / "docker").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "docker").chmod(0o755)
    with pytest.raises(InputError, match="docker does not work here"):
        make_runtime("container").check()
    find_engine.cache_clear()
