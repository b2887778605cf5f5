"""Publishers with two servers that act as engines: what is saved, loaded, kept, named and
undone."""

import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from peft import LoraConfig, get_peft_model

from rolltap.addons.errors import EngineError, InputError, RunError
from rolltap.trainer.engine import publish
from rolltap.trainer.engine.engines import Engines
from rolltap.trainer.engine.publish import make_publisher
from tests.conftest import ROOT
from tests.trainer.engine.acting import agreed
from tests.trainer.training.step.tiny import tiny_model

# peft 0.21 uses a name that transformers 5.23 deprecates
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

OTHER = "policy-ffffffff.7.0"
"""The adapter of another training."""
LOAD = "/v1/load_lora_adapter"
KINDS = pytest.mark.parametrize("kind", ["checkpoint", "lora"])


def version(step, attempt=0):
    return f"1a2b3c4d.{step}.{attempt}"


def name(step, attempt=0):
    return f"policy-{version(step, attempt)}"


def disagree(served):
    raise EngineError("no agreement")


@pytest.fixture
def model():
    return get_peft_model(tiny_model(), LoraConfig(r=2, target_modules="all-linear"))


@pytest.fixture
def root(tmp_path):
    tiny_model().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def start(engines, root, tmp_path):
    """Return a function that returns a publisher, as a start of the training makes it."""

    def start(kind, adapters=2, run="run"):
        (tmp_path / run).mkdir(exist_ok=True)
        return make_publisher(
            kind,
            engines,
            folder=tmp_path / "published",
            run=tmp_path / run,
            base=root,
            adapters=adapters,
        )

    return start


@pytest.fixture
def published(tmp_path):
    """Return a function that lists what is on the disk for the engines."""
    return lambda: sorted(path.name for path in (tmp_path / "published").iterdir())


@pytest.fixture
def policy(tmp_path):
    return lambda: json.loads((tmp_path / "run" / "policy.json").read_text())


@pytest.fixture
def loaded(pair):
    return lambda: [sorted(each.adapters) for each in pair]


@pytest.fixture
def served(pair):
    return lambda: [each.served for each in pair]


@pytest.fixture
def untouched(pair):
    """Assert at the end that no engine was asked to change."""
    yield
    for each in pair:
        assert each.served == ("base", "default", False)
        assert {"/pause", LOAD}.isdisjoint(each.paths)


class TestAdapters:
    def test_the_newest_stay_loaded_and_on_the_disk_and_those_of_others_are_left_alone(
        self, loaded, start, model, published, policy
    ):
        start("lora", run="one").publish(model, "ffffffff.7.0", agreed)
        publisher = start("lora", adapters=3)
        for step in range(5):
            assert publisher.publish(model, version(step), agreed) == name(step)
        kept = [name(2), name(3), name(4), OTHER]
        assert loaded() == [kept, kept]
        assert published() == kept  # two trainings share the folder
        assert policy() == {"model": name(4), "version": version(4)}

    def test_engines_that_do_not_agree_or_refuse_unload_it_and_the_policy_is_the_previous_one(
        self, pair, loaded, start, model, policy
    ):
        def look_and_disagree(served):
            assert loaded() == [[name(0), served]] * 2
            assert policy() == before
            disagree(served)

        before = {"model": name(0), "version": version(0)}
        publisher = start("lora")
        publisher.publish(model, version(0), agreed)
        with pytest.raises(EngineError, match="no agreement"):
            publisher.publish(model, version(1), look_and_disagree)
        assert loaded() == [[name(0)]] * 2
        pair[1].refuses[LOAD] = 1
        with pytest.raises(EngineError, match=rf"{pair[1].url}{LOAD}: 500"):
            publisher.publish(model, version(1), agreed)
        assert loaded() == [[name(0)]] * 2
        assert policy() == before

    def test_an_old_adapter_that_cannot_be_unloaded_is_unloaded_at_the_next_publication(
        self, pair, loaded, start, model, policy, caplog
    ):
        publisher = start("lora")
        for step in range(4):
            pair[1].refuses["/v1/unload_lora_adapter"] = int(step == 2)
            publisher.publish(model, version(step), agreed)
            assert policy()["model"] == name(step)
        assert loaded() == [[name(2), name(3)]] * 2
        assert f"stay loaded: POST {pair[1].url}/v1/unload_lora_adapter: 500" in caplog.text

    def test_an_engine_that_was_started_again_gets_the_adapters_that_sessions_keep(
        self, pair, loaded, start, model
    ):
        publisher = start("lora", adapters=3)
        for step in range(3):
            pair[0].start()
            publisher.publish(model, version(step), agreed)
        assert loaded() == [[name(0), name(1), name(2)]] * 2

    def test_a_start_after_a_kill_replaces_what_the_earlier_start_left(
        self, loaded, start, model, tmp_path, published
    ):
        start("lora").publish(model, version(3), agreed)
        (tmp_path / "published" / f".{name(4)}.partial").mkdir()
        start("lora").publish(model, version(3, attempt=1), agreed)
        again = name(3, attempt=1)
        assert loaded() == [[again]] * 2
        assert published() == [again]

    def test_they_are_saved_by_the_names_of_the_base(self, start, root, model, monkeypatch):
        saved = []

        def save(model, folder, base):
            saved.append(base)

        monkeypatch.setattr(publish, "save_adapter", save)
        start("lora").publish(model, version(1), agreed)
        assert saved == [root]


class TestCheckpoints:
    def test_the_published_checkpoint_and_no_other_is_on_the_disk(
        self, served, start, published, policy
    ):
        publisher = start("checkpoint")
        for step in range(3):
            assert publisher.publish(tiny_model(), version(step), agreed) is None
            assert served() == [(name(step), version(step), False)] * 2
            assert published() == [name(step)]
            assert policy() == {"model": None, "version": version(step)}

    @pytest.mark.parametrize(
        "step",
        [
            "/pause",
            "/collective_rpc",
            "/reset_prefix_cache",
            "/update_weight_version",
            "/resume",
            None,
        ],
    )
    def test_when_one_engine_refuses_or_they_do_not_agree_all_serve_the_previous_checkpoint(
        self, pair, served, start, policy, step
    ):
        def look_and_disagree(adapter):
            assert adapter is None
            assert served() == [(name(1), version(1), False)] * 2
            assert policy()["version"] == version(0)
            disagree(adapter)

        publisher = start("checkpoint")
        publisher.publish(tiny_model(), version(0), agreed)
        pair[1].refuses[step] = 1
        why = rf"{pair[1].url}{step}\S*: 500 .*" if step else "no agreement; "
        with pytest.raises(EngineError, match=rf"{why}all engines serve the weights {version(0)}"):
            publisher.publish(tiny_model(), version(1), look_and_disagree)
        assert served() == [(name(0), version(0), False)] * 2
        assert policy() == {"model": None, "version": version(0)}
        publisher.publish(tiny_model(), version(1), agreed)  # nothing is left of the failure
        assert served() == [(name(1), version(1), False)] * 2

    def test_a_policy_file_that_cannot_be_written_goes_back_too(self, served, start, tmp_path):
        publisher = start("checkpoint")
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(RunError, match=r"run/policy\.json could not be written"):
            publisher.publish(tiny_model(), version(1), agreed)
        assert served() == [("base", version(0), False)] * 2

    def test_adapters_are_unloaded_and_named_because_their_base_is_gone(
        self, pair, loaded, start, caplog
    ):
        pair[0].adapters = {OTHER: "/other", "judge": "/judge"}
        start("checkpoint").publish(tiny_model(), version(1), agreed)
        assert loaded() == [[], []]
        why = "the adapter judge was unloaded: it was made for other weights"
        assert f"{pair[0].url}: {why}" in caplog.text

    def test_when_the_first_publication_is_refused_all_serve_the_base_model(
        self, pair, served, start, tmp_path
    ):
        pair[0].refuses["/collective_rpc"] = 1
        base = version(0, attempt=4)
        with pytest.raises(EngineError, match=f"all engines serve the weights {base}"):
            start("checkpoint").publish(tiny_model(), version(9, attempt=4), agreed)
        assert served() == [("base", base, False)] * 2
        assert not (tmp_path / "run" / "policy.json").exists()

    def test_checkpoints_of_a_killed_start_are_removed_before_one_is_saved(
        self, start, tmp_path, published, monkeypatch
    ):
        before = []
        save = publish.save_weights

        def noted(*args):
            before.extend(published())
            save(*args)

        for left in (name(3), f".{name(4)}.partial", OTHER):
            (tmp_path / "published" / left).mkdir(parents=True)
        monkeypatch.setattr(publish, "save_weights", noted)
        start("checkpoint").publish(tiny_model(), version(3, attempt=1), agreed)
        again = name(3, attempt=1)
        assert before == [f".{again}.partial", OTHER]
        assert published() == [again, OTHER]

    def test_a_folder_without_room_for_two_checkpoints_is_refused_at_the_start(
        self, start, tmp_path, monkeypatch
    ):
        size = 2 * sum(weight.numel() for weight in tiny_model().parameters())  # in 16 bits

        def leave(free):
            usage = SimpleNamespace(free=free)
            monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)

        leave(2 * size)
        start("checkpoint").publish(tiny_model(), version(0), agreed)
        leave(size // 2)
        start("checkpoint")  # the checkpoint of the earlier start makes room
        shutil.rmtree(tmp_path / "published")
        with pytest.raises(RunError, match=r"published has 0\.0 GiB .* \(docker run --shm-size"):
            start("checkpoint")

    @pytest.mark.usefixtures("untouched")
    @pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
    def test_an_incomplete_checkpoint_is_refused_before_an_engine_is_touched(
        self, start, monkeypatch, missing
    ):
        save = publish.save_weights

        def save_in_part(model, folder, base):
            save(model, folder, base)
            (folder / missing).unlink()

        monkeypatch.setattr(publish, "save_weights", save_in_part)
        message = r"needs config.json and \*.safetensors; the engines are unchanged"
        with pytest.raises(InputError, match=message):
            start("checkpoint").publish(tiny_model(), version(1), agreed)

    @pytest.mark.usefixtures("untouched")
    def test_tied_embeddings_are_refused_where_the_engine_would_keep_the_old_ones(
        self, pair, start
    ):
        model = tiny_model()
        model.config.tie_word_embeddings = True
        pair[1].answers["/collective_rpc"] = {"results": ["backend=CPU"]}
        untie = r"untie them before the engine is started .* or publish LoRA adapters"
        with pytest.raises(InputError, match=untie):
            start("checkpoint").publish(model, version(1), agreed)


@pytest.mark.usefixtures("untouched")
def test_a_full_model_is_not_published_as_an_adapter(start):
    with pytest.raises(InputError, match="train with a peft_config, or publish checkpoints"):
        start("lora").publish(tiny_model(), version(0), agreed)


@KINDS
@pytest.mark.usefixtures("untouched")
def test_an_engine_that_was_stolen_is_not_published_to(kind, pair, engines, start, model):
    publisher = start(kind)
    with (
        engines.claimed("1a2b3c4d", "here"),
        Engines(pair[1].url).claimed("ffffffff", "there", steal=True),
        pytest.raises(EngineError, match=r"ffffffff \(there\)"),
    ):
        publisher.publish(model, version(0), agreed)


@KINDS
@pytest.mark.usefixtures("untouched")
def test_a_folder_that_cannot_be_written_is_named_and_the_engines_are_unchanged(
    kind, start, model, tmp_path
):
    (tmp_path / "published").write_text("a file")
    message = rf"published/{name(1)} could not be written: .*the engines are unchanged"
    with pytest.raises(RunError, match=message):
        start(kind).publish(model, version(1), agreed)


FULL = """
import sys
from pathlib import Path
from rolltap.addons.errors import RunError
from rolltap.trainer.engine import weights
from rolltap.trainer.models.saving import save_weights
from tests.trainer.training.step.tiny import tiny_model
base, folder = map(Path, sys.argv[1:])
try:
    with weights.new_folder(folder / "policy") as part:
        save_weights(tiny_model(), part, base)
except RunError as error:
    print(error)
"""


def test_a_full_memory_file_system_is_an_error_that_names_it(root, tmp_path, small_disk):
    shm = tmp_path / "shm"
    shm.mkdir()
    command = [*small_disk("16k", shm), sys.executable, "-c", FULL, root, shm]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    assert f"{shm}/policy could not be written" in run.stdout
    assert "No space left on device" in run.stdout
    assert "the engines are unchanged" in run.stdout
