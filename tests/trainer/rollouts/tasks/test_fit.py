import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.rollouts.tasks.fit import fit_tasks
from rolltap.trainer.rollouts.tasks.task import Task


class Plain:
    warning = None
    check = box = image_digest = print

    def __init__(self, name, isolated):
        self.name = name
        self.isolated = isolated


class Images(Plain):
    copy_out = print


PROCESS, SANDBOX, CONTAINER = Plain("process", False), Plain("sandbox", True), Images("container", True)
MOUNTS = {"kind": "command", "command": ["x"], "mounts": {"/tests": "tests"}}
SEVERAL = {"kind": "several", "judges": [{"name": "a", "judge": MOUNTS}]}


def make_task(**fields):
    given = {"id": "t", "instruction": "Do it.", "source": "a.jsonl, line 3", **fields}
    return Task(**given) if "judge" in fields else Task(evaluate=["true"], **given)


@pytest.mark.parametrize(
    ("fields", "runtime", "message"),
    [
        ({"image": "a/b"}, SANDBOX, r"needs the image a/b, and the runtime sandbox has no images"),
        ({"image": "a/b"}, PROCESS, r"needs the image a/b, and the runtime process has no images"),
        ({}, CONTAINER, r"has no image, and the runtime container needs one: give 'image'"),
        ({"needs_network": "test.sh, line 3"}, SANDBOX, r"needs a network: test\.sh, line 3\. The runtime sandbox"),
        ({"image": "a", "needs_network": "x"}, CONTAINER, r"needs a network: x\. The runtime container reaches"),
        ({"judge": MOUNTS}, PROCESS, r"its judge needs absolute paths of its own, .* runtime process does not have"),
        ({"judge": SEVERAL}, PROCESS, r"its judge needs absolute paths of its own"),
    ],
)
def test_what_the_runtime_does_not_have_is_named_with_its_task(fields, runtime, message):
    with pytest.raises(InputError, match=rf"task 't' \(a\.jsonl, line 3\):? {message}"):
        fit_tasks([make_task(), make_task(**fields)][runtime is CONTAINER :], runtime)


def test_an_optional_image_is_used_where_the_runtime_has_images():
    task = make_task(image="python:3.13", image_optional=True)
    assert [fit_tasks([task], runtime)[0].image for runtime in (PROCESS, SANDBOX)] == [None, None]
    assert fit_tasks([task], CONTAINER) == [task]


def test_what_a_runtime_has_is_left_as_it_is():
    assert fit_tasks([make_task(needs_network="x")], PROCESS) == [make_task(needs_network="x")]
    assert fit_tasks([make_task(judge=MOUNTS)], SANDBOX) == [make_task(judge=MOUNTS)]
