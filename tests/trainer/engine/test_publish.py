"""Publishers with two servers that act as engines: what is saved, loaded, kept, named and
undone."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model

from rolltap.addons.errors import EngineError, InputError, RunError
from rolltap.trainer.engine import publish
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.engine.engines import Engines
from rolltap.trainer.engine.publish import make_publisher
from tests.conftest import ROOT
from tests.trainer.engine.acting import acting, agreed
from tests.trainer.training.step.tiny import tiny_model

# peft 0.21 uses a name that transformers 5.23 deprecates
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

OTHER = "policy-ffffffff.7.0"
"""The adapter of another training."""


def version(step, attempt=0):
    return f"1a2b3c4d.{step}.{attempt}"


def name(step, attempt=0):
    return f"policy-{version(step, attempt)}"


@pytest.fixture
def model():
    return get_peft_model(tiny_model(), LoraConfig(r=2, target_modules="all-linear"))


@pytest.fixture
def base(tmp_path) -> Path:
    tiny_model().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def pair(base):
    with acting(base) as one, acting(base) as two:
        yield one, two


@pytest.fixture
def start(pair, base, tmp_path):
    """Return a function that returns a publisher, as a start of the training makes it."""

    def start(kind, adapters=2, run="run"):
        (tmp_path / run).mkdir(exist_ok=True)
        engines = Engines([each.url for each in pair])
        folder = tmp_path / "published"
        return make_publisher(
            kind, engines, folder=folder, run=tmp_path / run, base=base, adapters=adapters
        )

    return start


@pytest.fixture
def published(tmp_path):
    """Return a function that lists what is on the disk for the engines."""
    return lambda: sorted(path.name for path in (tmp_path / "published").iterdir())


@pytest.fixture
def policy(tmp_path):
    return lambda: json.loads((tmp_path / "run" / "policy.json").read_text())


class TestAdapters:
    def loaded(self, pair):
        return [sorted(each.adapters) for each in pair]

    def test_the_newest_stay_loaded_and_on_the_disk_and_those_of_others_are_left_alone(
        self, pair, start, model, published, policy
    ):
        start("lora", run="one").publish(model, "ffffffff.7.0", agreed)
        publisher = start("lora", adapters=3)
        for step in range(5):
            assert publisher.publish(model, version(step), agreed) == name(step)
        kept = [name(2), name(3), name(4)]
        assert self.loaded(pair) == [[*kept, OTHER]] * 2
        assert published() == [*kept, OTHER]  # two trainings share the folder
        assert policy() == {"model": name(4), "version": version(4)}

    def test_engines_that_do_not_agree_or_refuse_unload_it_and_the_policy_is_the_previous_one(
        self, pair, start, model, policy
    ):
        def disagree(served):
            assert self.loaded(pair) == [[name(0), served]] * 2
            assert policy() == {"model": name(0), "version": version(0)}
            raise EngineError("no agreement")

        publisher = start("lora")
        publisher.publish(model, version(0), agreed)
        with pytest.raises(EngineError, match="no agreement"):
            publisher.publish(model, version(1), disagree)
        assert self.loaded(pair) == [[name(0)]] * 2
        assert policy() == {"model": name(0), "version": version(0)}
        pair[1].refuses["/v1/load_lora_adapter"] = 1
        with pytest.raises(EngineError, match=rf"{pair[1].url}/v1/load_lora_adapter: 500"):
            publisher.publish(model, version(1), agreed)
        assert self.loaded(pair) == [[name(0)]] * 2
        assert policy() == {"model": name(0), "version": version(0)}

    def test_an_old_adapter_that_cannot_be_unloaded_is_unloaded_at_the_next_publication(
        self, pair, start, model, policy, caplog
    ):
        publisher = start("lora")
        for step in range(4):
            pair[1].refuses["/v1/unload_lora_adapter"] = int(step == 2)
            publisher.publish(model, version(step), agreed)
            assert policy()["model"] == name(step)
        assert self.loaded(pair) == [[name(2), name(3)]] * 2
        assert f"stay loaded: POST {pair[1].url}/v1/unload_lora_adapter: 500" in caplog.text

    def test_an_engine_that_was_started_again_gets_the_adapters_that_sessions_keep(
        self, pair, start, model
    ):
        publisher = start("lora", adapters=3)
        publisher.publish(model, version(0), agreed)
        publisher.publish(model, version(1), agreed)
        pair[0].start()
        publisher.publish(model, version(2), agreed)
        assert self.loaded(pair) == [[name(0), name(1), name(2)]] * 2

    def test_a_start_after_a_kill_replaces_what_the_earlier_start_left(
        self, pair, start, model, tmp_path, published
    ):
        start("lora").publish(model, version(3), agreed)
        (tmp_path / "published" / f".{name(4)}.partial").mkdir()
        start("lora").publish(model, version(3, attempt=1), agreed)
        assert self.loaded(pair) == [[name(3, attempt=1)]] * 2
        assert published() == [name(3, attempt=1)]


class TestCheckpoints:
    def served(self, pair):
        return [(each.weights, each.version, each.paused) for each in pair]

    def test_the_published_checkpoint_and_no_other_is_on_the_disk(
        self, pair, start, published, policy
    ):
        publisher = start("checkpoint")
        for step in range(3):
            assert publisher.publish(tiny_model(), version(step), agreed) is None
            assert self.served(pair) == [(name(step), version(step), False)] * 2
            assert published() == [name(step)]
            assert policy() == {"model": None, "version": version(step)}

    @pytest.mark.parametrize(
        "step", ["/pause", "/collective_rpc", "/update_weight_version", "/resume", None]
    )
    def test_when_one_engine_refuses_or_they_do_not_agree_all_serve_the_previous_checkpoint(
        self, pair, start, policy, step, monkeypatch
    ):
        def disagree(served):
            assert (served, self.served(pair)) == (None, [(name(1), version(1), False)] * 2)
            assert policy()["version"] == version(0)
            raise EngineError("no agreement")

        monkeypatch.setattr(EngineAdmin, "runs_on_cpu", lambda engine: False)
        publisher = start("checkpoint")
        publisher.publish(tiny_model(), version(0), agreed)
        pair[1].refuses |= {step: 1}
        why = rf"{pair[1].url}{step}\S*: 500 .*" if step else "no agreement; "
        with pytest.raises(EngineError, match=rf"{why}all engines serve the weights {version(0)}"):
            publisher.publish(tiny_model(), version(1), disagree)
        assert self.served(pair) == [(name(0), version(0), False)] * 2
        assert policy() == {"model": None, "version": version(0)}
        publisher.publish(tiny_model(), version(1), agreed)  # nothing is left of the failure
        assert self.served(pair) == [(name(1), version(1), False)] * 2

    def test_a_policy_file_that_cannot_be_written_goes_back_too(self, pair, start, tmp_path):
        publisher = start("checkpoint")
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(RunError, match=r"run/policy\.json could not be written"):
            publisher.publish(tiny_model(), version(1), agreed)
        assert self.served(pair) == [("base", version(0), False)] * 2

    def test_adapters_are_unloaded_and_named_because_their_base_is_gone(self, pair, start, caplog):
        pair[0].adapters |= {OTHER: "/other", "judge": "/judge"}
        start("checkpoint").publish(tiny_model(), version(1), agreed)
        assert [each.adapters for each in pair] == [{}, {}]
        assert (
            f"{pair[0].url}: the adapter judge was unloaded: it was made for other weights"
            in caplog.text
        )

    def test_when_the_first_publication_is_refused_all_serve_the_base_model(
        self, pair, start, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(EngineAdmin, "runs_on_cpu", lambda engine: False)
        pair[0].refuses["/collective_rpc"] = 1
        with pytest.raises(
            EngineError, match=rf"all engines serve the weights {version(0, attempt=4)}"
        ):
            start("checkpoint").publish(tiny_model(), version(9, attempt=4), agreed)
        assert self.served(pair) == [("base", version(0, attempt=4), False)] * 2
        assert not (tmp_path / "run" / "policy.json").exists()

    def test_checkpoints_of_a_killed_start_are_removed_before_one_is_saved(
        self, pair, start, tmp_path, published, monkeypatch
    ):
        for left in (name(3), f".{name(4)}.partial", OTHER):
            (tmp_path / "published" / left).mkdir(parents=True)
        save, before = publish.save_weights, []
        monkeypatch.setattr(
            publish, "save_weights", lambda *args: (before.extend(published()), save(*args))
        )
        start("checkpoint").publish(tiny_model(), version(3, attempt=1), agreed)
        assert before == [f".{name(3, attempt=1)}.partial", OTHER]
        assert published() == [name(3, attempt=1), OTHER]

    def test_a_folder_without_room_for_two_checkpoints_is_refused_at_the_start(
        self, start, base, monkeypatch
    ):
        size = 2 * sum(
            weight.numel() for weight in tiny_model().state_dict().values()
        )  # in 16 bits
        usage = shutil.disk_usage(base)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=2 * size))
        start("checkpoint").publish(tiny_model(), version(0), agreed)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=size // 2))
        start("checkpoint")  # the checkpoint of the earlier start makes room
        shutil.rmtree(base.parent / "published")
        with pytest.raises(RunError, match=r"published has 0\.0 GiB .* \(docker run --shm-size"):
            start("checkpoint")

    @pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
    def test_an_incomplete_checkpoint_is_refused_before_an_engine_is_touched(
        self, pair, start, monkeypatch, missing
    ):
        save = publish.save_weights

        def save_in_part(model, folder, base):
            save(model, folder, base)
            (folder / missing).unlink()

        monkeypatch.setattr(publish, "save_weights", save_in_part)
        with pytest.raises(
            InputError, match=r"needs config.json and \*.safetensors; the engines are unchanged"
        ):
            start("checkpoint").publish(tiny_model(), version(1), agreed)
        assert self.served(pair) == [("base", "default", False)] * 2
        assert "/pause" not in pair[0].paths

    def test_tied_embeddings_are_refused_where_the_engine_would_keep_the_old_ones(
        self, pair, start, monkeypatch
    ):
        model = tiny_model()
        model.config.tie_word_embeddings = True
        monkeypatch.setattr(EngineAdmin, "runs_on_cpu", lambda engine: True)
        with pytest.raises(
            InputError, match=r"untie them before the engine is started .* or publish LoRA adapters"
        ):
            start("checkpoint").publish(model, version(1), agreed)
        with pytest.raises(InputError, match="train with a peft_config, or publish checkpoints"):
            start("lora").publish(model, version(0), agreed)
        assert not {"/pause", "/v1/load_lora_adapter"} & {*pair[0].paths}


@pytest.mark.parametrize("kind", ["checkpoint", "lora"])
def test_an_engine_that_was_stolen_is_not_published_to(kind, pair, base, model, tmp_path):
    engines = Engines([each.url for each in pair])
    publisher = make_publisher(
        kind, engines, folder=tmp_path / "p", run=tmp_path, base=base, adapters=2
    )
    with (
        engines.claimed("1a2b3c4d", "here"),
        Engines(pair[1].url).claimed("ffffffff", "there", steal=True),
        pytest.raises(EngineError, match=r"ffffffff \(there\)"),
    ):
        publisher.publish(model, version(0), agreed)
    served = [(each.weights, each.version, each.paused, each.adapters) for each in pair]
    assert served == [("base", "default", False, {})] * 2


@pytest.mark.parametrize("kind", ["checkpoint", "lora"])
def test_a_folder_that_cannot_be_written_is_named_and_the_engines_are_unchanged(
    kind, pair, start, model, tmp_path
):
    (tmp_path / "published").write_text("a file")
    with pytest.raises(
        RunError, match=rf"published/{name(1)} could not be written: .*the engines are unchanged"
    ):
        start(kind).publish(model, version(1), agreed)
    assert not {"/pause", "/v1/load_lora_adapter"} & {*pair[0].paths, *pair[1].paths}


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


def test_a_full_memory_file_system_is_an_error_that_names_it(base, tmp_path, small_disk):
    (tmp_path / "shm").mkdir()
    command = [
        *small_disk("16k", tmp_path / "shm"),
        sys.executable,
        "-c",
        FULL,
        base,
        tmp_path / "shm",
    ]
    printed = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT
    ).stdout
    assert f"{tmp_path}/shm/policy could not be written" in printed
    assert "No space left on device" in printed
    assert "the engines are unchanged" in printed


def test_adapters_are_saved_by_the_names_of_the_base(start, base, model, monkeypatch):
    saved = []
    monkeypatch.setattr(publish, "save_adapter", lambda model, folder, base: saved.append(base))
    start("lora").publish(model, version(1), agreed)
    assert saved == [base]
