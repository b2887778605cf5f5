"""Tasks of requests: how far they may reach."""

import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.containers.container import ContainerRuntime
from rolltap.trainer.boxes.process import ProcessRuntime
from rolltap.trainer.boxes.sandbox import SandboxRuntime
from rolltap.trainer.rollouts.config import RolloutConfig
from rolltap.trainer.rollouts.worker import Worker
from rolltap.trainer.service.requests import GroupRequest
from rolltap.trainer.service.tasks import requested_task, require_portable
from rolltap.trainer.tasks.task import Task


def judged_by(url):
    judge = {"kind": "llm", "rubric": "r", "url": url, "model": "m"}
    return Task(id="t", instruction="go", judge=judge)


def of_image(image):
    return Task(id="t", instruction="go", evaluate=["true"], image=image)


ASKED = {
    "another port of this machine": "http://127.0.0.1:8900/v1",
    "the metadata of a cloud": "http://169.254.169.254/latest",
    "a named host on another port": "https://judge.example:8443/v1",
    "a named host by another scheme": "http://judge.example/v1",
    "a named host as the user of another": "https://judge.example@10.0.0.1/v1",
    "a host that ends like a named one": "https://evil.judge.example/v1",
    "no URL": "judge.example/v1",
    "a file": "file:///etc/passwd",
}


@pytest.mark.parametrize("name", ASKED)
def test_a_judge_asks_no_host_that_the_operator_did_not_name(name):
    task = judged_by(ASKED[name])
    with pytest.raises(InputError, match=r"'judge\.url' .*--allow-host"):
        require_portable(task, SandboxRuntime(), {"judge.example"})


def test_one_of_several_judges_is_held_to_the_same():
    judges = [{"name": "a", "judge": judged_by("http://10.0.0.1/v1").judge.model_dump()}]
    task = Task(id="t", instruction="go", judge={"kind": "several", "judges": judges})
    with pytest.raises(InputError, match=r"'judge\.url' .*10\.0\.0\.1"):
        require_portable(task, SandboxRuntime(), set())


@pytest.mark.parametrize(
    "url", ["https://judge.example/v1", "https://JUDGE.example:443/v1", "http://10.0.0.1:8000"]
)
def test_a_judge_asks_the_hosts_that_the_operator_named(url):
    require_portable(judged_by(url), SandboxRuntime(), {"judge.example", "10.0.0.1:8000"})


WANTED = {
    "another host": "files.pypi.org",
    "another port": "pypi.org:22",
    "all ports": "pypi.org:*",
    "hosts that end like a named one": "*.pypi.org",
    "all hosts": "*",
    "this machine": "127.0.0.1:8000",
    "the metadata of a cloud": "169.254.169.254:80",
    "a port of the web, where another was named": "judge.example",
}


@pytest.mark.parametrize("name", WANTED)
@pytest.mark.parametrize("key", ["allow", r"judge\.allow"])
def test_a_session_and_its_judge_reach_no_host_that_the_operator_did_not_name(name, key):
    hosts = ["pypi.org", WANTED[name]]
    judge = {"kind": "command", "command": ["true"]}
    task = Task(id="t", instruction="go", judge=judge, allow=hosts)
    if key != "allow":
        task = Task(id="t", instruction="go", judge={**judge, "allow": hosts})
    with pytest.raises(InputError, match=rf"'{key}' has .*--allow-host"):
        require_portable(task, SandboxRuntime(), {"pypi.org", "judge.example:8443"})


@pytest.mark.parametrize(
    "allow", [None, [], ["pypi.org"], ["PyPI.org:443", "judge.example:8443"], ["any.example:22"]]
)
def test_a_session_and_its_judge_reach_the_hosts_that_the_operator_named(allow):
    judge = {"kind": "pytest", "allow": allow or []}
    task = Task(id="t", instruction="go", judge=judge, allow=allow)
    require_portable(task, SandboxRuntime(), {"pypi.org", "judge.example:8443", "any.example:*"})


IMAGES = {
    "a folder of this machine": "/srv/image",
    "a folder of this machine, as a transport": "dir:/srv/image",
    "a folder beside the service": "dir:image",
    "an archive": "docker-archive:/srv/image.tar",
    "an archive beside the service": "oci-archive:image.tar",
    "a URI": "docker://registry.example/x",
    "an option": "--privileged",
    "a registry that nobody named": "10.0.0.1:5000/x",
    "Docker Hub, which nobody named": "debian:12",
    "a registry of this machine": "localhost:5000/x",
}


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_is_from_a_registry_that_the_operator_named(name):
    with pytest.raises(InputError, match="'image' "):
        require_portable(of_image(IMAGES[name]), ContainerRuntime(), {"registry.example"})


@pytest.mark.parametrize(
    "image", ["registry.example/a/b:1.2", "debian", "a/b@sha256:" + "0" * 64, "localhost/x:1"]
)
def test_an_image_of_a_named_registry_or_of_this_machine_is_taken(image):
    require_portable(of_image(image), ContainerRuntime(), {"registry.example", "docker.io"})


def test_a_runtime_that_does_not_isolate_takes_no_task_of_a_request():
    with pytest.raises(InputError, match="does not hold code from requests"):
        require_portable(of_image(None), ProcessRuntime(), set())


def test_a_group_cannot_evaluate_where_the_recorder_has_a_port_that_is_chosen(tmp_path):
    config = RolloutConfig(recorder={"listen_port": "8899"})
    engine = "http://127.0.0.1:1"
    worker = Worker(config, harness="pi", engine=engine, model="m", out=tmp_path / "run")
    task = Task(id="t", instruction="go", evaluate=["true"])
    request = GroupRequest(id="g", task="t", sessions=1)
    assert requested_task(request, {"t": task}, worker, ()) is task
    evaluating = request.model_copy(update={"evaluation": True})
    with pytest.raises(InputError, match=r"'evaluation' is true, .* listen_port = 8899"):
        requested_task(evaluating, {"t": task}, worker, ())
