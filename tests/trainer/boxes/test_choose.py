from typing import get_args

import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.choose import make_runtime
from rolltap.trainer.boxes.containers.find import find_engine
from rolltap.trainer.boxes.hiding import HidingRuntime
from rolltap.trainer.boxes.runtime import ImageRuntime
from rolltap.trainer.rollouts.config import RolloutConfig

HARBOR = {"harbor_python": "python", "harbor_environment": "daytona"}
NEEDED = {"ssh": {"ssh": "machine"}, "harbor": HARBOR}


@pytest.mark.parametrize("name", get_args(RolloutConfig.model_fields["runtime"].annotation))
def test_each_runtime_is_made_by_its_name_and_tools_are_folders(name, tmp_path):
    settings = dict(NEEDED.get(name, {}))
    if name in ("sandbox", "container", "harbor"):
        settings["tools"] = [tmp_path, str(tmp_path)]
    runtime = make_runtime(name, **settings)
    assert runtime.name == name
    assert runtime.isolated is (name != "process")
    assert isinstance(runtime, HidingRuntime) is (name not in ("process", "ssh", "harbor"))


@pytest.mark.parametrize(
    ("kind", "has_images"),
    [(None, False), ("sandbox", False), ("container", True), ("apptainer", True)],
)
def test_boxes_behind_ssh_have_images_where_the_runtime_there_has_them(kind, has_images):
    runtime = make_runtime("ssh", ssh="machine", ssh_kind=kind)
    assert isinstance(runtime, ImageRuntime) is has_images


WITHOUT_MEANING = [
    ("process", {"tools": ["/opt"]}),
    ("process", {"build": True}),
    ("sandbox", {"container_engine": "podman"}),
    ("sandbox", {"ssh": "machine"}),
    ("sandbox", {"harbor_python": "python"}),
    ("sandbox", {"recorder_address": "a:1"}),
    ("apptainer", {"container_arguments": ["-x"]}),
    ("container", {"ssh_kind": "sandbox"}),
    ("harbor", {"ssh": "machine"}),
    ("ssh", {"build": True, "ssh": "machine"}),
]


@pytest.mark.parametrize(("name", "settings"), WITHOUT_MEANING)
def test_a_setting_of_another_runtime_is_named_with_the_fix(name, settings):
    key = next(iter(settings))
    with pytest.raises(InputError, match=rf"{key} = .* has no meaning .*: remove it"):
        make_runtime(name, **settings)


WRONG = [
    ("ssh", {}, 'runtime = "ssh" needs a machine: --ssh USER@HOST'),
    ("ssh", {"ssh": "-oProxyCommand=x"}, "'-oProxyCommand=x' is no machine.*--ssh USER@HOST"),
    (
        "ssh",
        {"ssh": "machine", "container_engine": "docker"},
        "no meaning .*ssh_kind = .sandbox.: remove it",
    ),
    ("harbor", {}, 'runtime = "harbor" needs harbor_python .*and harbor_environment'),
    (
        "harbor",
        {**HARBOR, "harbor_environment": "/no/such.json"},
        "/no/such.json, which cannot be read",
    ),
    ("sandbox", {"tools": ["/no/such"]}, '"/no/such", which is no folder: write the folder'),
]


@pytest.mark.parametrize(("name", "settings", "message"), WRONG)
def test_a_wrong_setting_is_named_with_the_fix(name, settings, message):
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
