"""The weights that the engines of a training serve, with folders in place of engines."""

import json
import shutil

import pytest
from peft import get_peft_model
from rich.console import Console
from safetensors.torch import load_file, save_file

from rolltap.addons.errors import EngineError, RunError
from rolltap.trainer.engine import engines
from rolltap.trainer.engine.engines import Engines
from rolltap.trainer.training.recipe import Recipe
from rolltap.trainer.training.serving import Serving, published_folder
from tests.trainer.training.stand_ins import FolderEngine, Points, logprobs_of, lora, tiny_folder
from tests.trainer.training.step.tiny import tiny_model

URLS = "http://127.0.0.1:9,http://127.0.0.1:10"


class Trainer:
    """Stands in for the trainer: a model that is scored, and noted metrics."""

    def __init__(self, model):
        self.model = model
        self.logged = {}

    def score(self, ids, *, base=False):
        return logprobs_of(self.model, list(ids[:1]), list(ids[1:]))

    def log_metrics(self, values):
        self.logged |= values


@pytest.fixture
def serving(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(FolderEngine, "folder", tmp_path / "engine", raising=False)
    monkeypatch.setattr(FolderEngine, "model", tiny_folder(tmp_path / "model"), raising=False)
    monkeypatch.setattr(FolderEngine, "points", Points(None), raising=False)
    monkeypatch.setattr(engines, "EngineAdmin", FolderEngine)

    def serving(**settings):
        recipe = Recipe(model=tmp_path / "model", steps=1, **settings)
        return Serving(recipe, Engines(URLS), tmp_path / "published", tmp_path / "run")

    return serving


@pytest.fixture
def trainer():
    model = tiny_model()
    model.requires_grad_(False)
    return Trainer(model)


@pytest.fixture
def stepped(trainer):
    """The trainer, with weights that changed as in a step."""
    trainer.model.lm_head.weight += 0.1 * trainer.model.lm_head.weight.flip(0)
    return trainer


def test_what_was_published_is_compared_with_the_trainer(serving, stepped):
    serving().publish(stepped, "1a2b3c4d.1.0")
    assert stepped.logged["engine_difference"] < 1e-5


def test_an_engine_that_did_not_apply_the_weights_is_named_with_the_difference_and_the_fix(
    serving, stepped, monkeypatch
):
    install = FolderEngine.install

    def lose(engine, checkpoint, version):
        install(engine, engine.model if engine.url.endswith(":10") else checkpoint, version)

    monkeypatch.setattr(FolderEngine, "install", lose)
    monkeypatch.setattr(FolderEngine, "_name", lambda *_: None)
    message = (
        r"^the engine at http://127\.0\.0\.1:10: .*1a2b3c4d\.1\.0 .* by \d.* nats .*limit is"
        r" 0\.001: .*max_diff"
    )
    with pytest.raises(EngineError, match=message):
        serving().publish(stepped, "1a2b3c4d.1.0")
    assert stepped.logged["engine_difference"] > 1e-3
    stepped.logged.clear()
    serving(max_difference=100.0).publish(stepped, "1a2b3c4d.1.0")  # the recipe may allow it
    assert stepped.logged["engine_difference"] > 1e-3


def test_weights_without_agreement_are_never_the_policy_and_the_engines_go_back(
    serving, trainer, tmp_path, monkeypatch
):
    published = serving(max_difference=1e-6)
    published.publish(trainer, "1a2b3c4d.0.0")
    score = trainer.score
    monkeypatch.setattr(trainer, "score", lambda ids: [logprob - 1 for logprob in score(ids)])
    with pytest.raises(EngineError, match=r"all engines serve the weights 1a2b3c4d\.0\.0"):
        published.publish(trainer, "1a2b3c4d.1.0")
    assert json.loads((tmp_path / "run" / "policy.json").read_text())["version"] == "1a2b3c4d.0.0"
    for port in ("9", "10"):
        assert (tmp_path / "engine" / port / "version").read_text() == "1a2b3c4d.0.0"


# peft 0.21 uses a name that transformers 5.23 deprecates
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
class TestTheLastAdapter:
    @pytest.fixture
    def adapted(self, trainer):
        trainer.model = get_peft_model(trainer.model, lora())
        return trainer

    def adapters(self, tmp_path):
        return [
            sorted(path.name for path in (tmp_path / "engine" / port).glob("policy-*"))
            for port in ("9", "10")
        ]

    def test_it_alone_stays_loaded_from_the_run_folder(
        self, serving, adapted, tmp_path, monkeypatch
    ):
        loaded = []
        load = FolderEngine.load_adapter
        monkeypatch.setattr(
            FolderEngine, "load_adapter", lambda *args: (loaded.append(args[2]), load(*args))
        )
        published = serving(publish="lora", publish_folder=tmp_path)
        for step in range(3):
            published.publish(adapted, f"1a2b3c4d.{step}.0")
        published.publish(adapted, "1a2b3c4d.3.0", last=True)
        assert self.adapters(tmp_path) == [["policy-1a2b3c4d.3.0"]] * 2
        assert loaded[-1] == tmp_path / "run" / "published" / "policy-1a2b3c4d.3.0"
        assert loaded[-1].is_dir()

    def test_engines_that_do_not_see_the_run_folder_get_it_as_before(
        self, serving, adapted, tmp_path, monkeypatch, caplog
    ):
        load = FolderEngine.load_adapter

        def elsewhere(engine, name, folder):
            if "run" in folder.parts:
                raise EngineError("no such folder")
            load(engine, name, folder)

        monkeypatch.setattr(FolderEngine, "load_adapter", elsewhere)
        published = serving(publish="lora", publish_folder=tmp_path)
        published.publish(adapted, "1a2b3c4d.3.0", last=True)
        assert self.adapters(tmp_path) == [["policy-1a2b3c4d.3.0"]] * 2
        assert "cannot be loaded from the run folder: no such folder" in caplog.text


class TestSteps:
    @pytest.fixture
    def console(self):
        return Console(record=True, width=1000)

    @pytest.fixture
    def begun(self, serving, trainer, console):
        """Return a function that verifies engines, whose tokens differ by so much from the
        trainer's."""

        score = trainer.score

        def begun(differs=0.0, **settings):
            trainer.score = lambda ids, base=False: [logprob - differs for logprob in score(ids)]
            started = serving(**settings)
            started.verify_base(trainer, "1a2b3c4d.0.0", console)
            return started

        return begun

    def metrics(self, tokens=1000.0, **kinds):
        return {
            **{f"difference/{kind}": value for kind, value in kinds.items()},
            **{f"tokens/{kind}": tokens for kind in kinds},
        }

    def test_the_difference_of_the_base_weights_is_printed_with_the_limits_that_follow_from_it(
        self, begun, console
    ):
        begun(0.011, dtype="bfloat16")
        printed = console.export_text()
        assert (
            "by 1.1e-02 nats on average; more than 3.3e-02 is a warning, more than 0.1 ends the"
            " training" in printed
        )
        begun(dtype="bfloat16")
        assert (
            "more than 1.0e-02 is a warning" in console.export_text()
        )  # a tenth of the limit in any case

    def test_the_first_step_is_printed_and_is_no_warning_where_rounding_explains_it(
        self, begun, console
    ):
        started = begun(0.011, dtype="bfloat16")
        console.export_text()
        for step in (4, 5):
            started.check_step(step, self.metrics(root=0.02, bridged=0.012), console)
        assert console.export_text().splitlines() == [
            (
                "step 5: a sampled token after a root prompt differs from the trainer's by 2.0e-02"
                " nats on average"
            ),
            (
                "step 5: a sampled token after a bridged prompt differs from the trainer's by"
                " 1.2e-02 nats on average"
            ),
        ]

    def test_more_than_rounding_is_a_warning_that_names_the_kind_of_prompt(self, begun, console):
        started = begun(0.011, dtype="bfloat16")
        started.check_step(0, self.metrics(root=0.02, bridged=0.05), console)
        (warning,) = [
            line for line in console.export_text().splitlines() if line.startswith("warning")
        ]
        assert "after a bridged prompt differs from the trainer's by 5.0e-02 nats" in warning
        assert warning.endswith("rounding explains 3.3e-02")

    @pytest.mark.parametrize("differs", [0.32, float("nan"), float("inf")])
    def test_more_than_the_limit_ends_the_training(self, begun, console, differs):
        started = begun(0.011, dtype="bfloat16")
        with pytest.raises(
            EngineError,
            match=r"step 4: .* after a bridged prompt .*limit is 0\.1: .* max_difference",
        ):
            started.check_step(3, self.metrics(root=0.02, bridged=differs), console)
        begun(0.011, dtype="bfloat16", max_difference=1.0).check_step(
            3, self.metrics(bridged=0.32), console
        )

    def test_a_few_tokens_alone_end_nothing(self, begun, console):
        begun(dtype="bfloat16").check_step(3, self.metrics(63.0, bridged=0.32), console)
        assert "warning: step 4: " in console.export_text()

    def test_a_few_tokens_of_each_step_end_it_together(self, begun, console):
        started = begun(dtype="bfloat16")
        for step in range(3):
            started.check_step(step, self.metrics(20.0, bridged=0.32, root=0.01), console)
        with pytest.raises(EngineError, match=r"step 4: .* after a bridged prompt"):
            started.check_step(3, self.metrics(20.0, bridged=0.32, root=0.01), console)

    def test_a_step_of_older_weights_says_nothing(self, begun, console):
        started = begun()
        console.export_text()
        started.check_step(3, {"off_policy/bridged": 2.0, "tokens/bridged": 100.0}, console)
        assert console.export_text() == ""


def test_adapters_of_ended_trainings_are_unloaded_at_the_start(serving, trainer, tmp_path):
    started = serving()
    for name in ("policy-22222222.1.0", "policy-1a2b3c4d.1.0"):
        (tmp_path / "engine" / "9" / name).mkdir()
    with started.engines.claimed("1a2b3c4d", "here"):
        started.verify_base(trainer, "1a2b3c4d.0.1", Console())
    assert [path.name for path in (tmp_path / "engine" / "9").glob("policy-*")] == [
        "policy-1a2b3c4d.1.0"
    ]


def test_an_engine_with_other_weights_gets_those_of_the_recipes_model(serving, trainer, tmp_path):
    console = Console(record=True, width=1000)
    place = FolderEngine(URLS.split(",")[1]).place
    weights = load_file(place / "model.safetensors")
    save_file(
        {**weights, "lm_head.weight": weights["lm_head.weight"] * 2}, place / "model.safetensors"
    )
    serving().verify_base(trainer, "1a2b3c4d.0.0", console)
    assert (place / "version").read_text() == "1a2b3c4d.0.0"
    assert (tmp_path / "engine" / "9" / "version").read_text() == "default"
    assert (
        "http://127.0.0.1:10 serves the weights default, which differ from" in console.export_text()
    )


def test_an_engine_with_two_words_swapped_in_its_vocabulary_is_named(
    serving, trainer, tmp_path, monkeypatch
):
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "model", other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words["w5"], words["w6"] = words["w6"], words["w5"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    monkeypatch.setattr(FolderEngine, "model", other)
    message = (
        r"the engine at http://127\.0\.0\.1:9 serves .*other, whose vocabulary is not that of"
        r" .*model: start"
    )
    with pytest.raises(EngineError, match=message):
        serving().verify_base(trainer, "1a2b3c4d.0.0", Console())


class TestFolder:
    def test_it_is_in_the_run_and_stays_or_elsewhere_the_trainings_own_and_is_removed(
        self, tmp_path
    ):
        with published_folder(Recipe(model="m", steps=1), tmp_path, "1a2b3c4d") as folder:
            folder.mkdir()
        assert folder == tmp_path / "published"
        assert folder.exists()
        recipe = Recipe(model="m", steps=1, publish_folder=tmp_path / "shm")
        with published_folder(recipe, tmp_path, "1a2b3c4d") as folder:
            assert folder == tmp_path / "shm" / "1a2b3c4d"
            (folder / "weights").touch()
        assert list((tmp_path / "shm").iterdir()) == []

    def test_a_start_removes_those_of_killed_trainings_and_nothing_else(self, tmp_path):
        recipe = Recipe(model="m", steps=1, publish_folder=tmp_path / "shm")
        for left in (
            "22222222/policy-22222222.1.0",
            "22222222/.policy-22222222.2.0.partial",
            "33333333/mine",
            "data",
        ):
            (tmp_path / "shm" / left).mkdir(parents=True)
        with (
            published_folder(recipe, tmp_path, "1a2b3c4d") as folder,
            published_folder(recipe, tmp_path, "44444444") as other,
        ):
            assert folder.is_dir()
            assert sorted(path.name for path in (tmp_path / "shm").iterdir()) == [
                *(folder.name, "33333333", other.name, "data")
            ]

    def test_one_that_cannot_be_made_is_named(self, tmp_path):
        (tmp_path / "file").touch()
        recipe = Recipe(model="m", steps=1, publish_folder=tmp_path / "file")
        with (
            pytest.raises(RunError, match=r"^publish_folder: .*/file/1a2b3c4d cannot be made"),
            published_folder(recipe, tmp_path, "1a2b3c4d"),
        ):
            pass
