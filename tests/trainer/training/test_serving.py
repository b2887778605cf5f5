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

URLS = ("http://127.0.0.1:9", "http://127.0.0.1:10")


class Trainer:
    """Stands in for the trainer: a model that is scored, and noted metrics."""

    def __init__(self, model):
        self.model = model
        self.logged = {}
        self.differs = 0.0
        """Nats by which its scores are lower than those of the model."""

    def score(self, ids, *, base=False):
        scores = logprobs_of(self.model, list(ids[:1]), list(ids[1:]))
        return [score - self.differs for score in scores]

    def log_metrics(self, values):
        self.logged |= values


class Deaf(FolderEngine):
    """An engine that loads the model's own weights in place of those that it is given."""

    def install(self, checkpoint, version):
        super().install(self.model, version)

    def _name(self, version, weights):
        """Take the name, whatever the weights."""


class Elsewhere(FolderEngine):
    """An engine that does not see the run folder."""

    def load_adapter(self, name, folder):
        if "run" in folder.parts:
            raise EngineError("no such folder")
        super().load_adapter(name, folder)


@pytest.fixture
def serving(tmp_path, monkeypatch):
    """A function: a class for the second engine, and keys of a recipe -> the weights that two
    engines serve."""
    (tmp_path / "run").mkdir()
    FolderEngine.folder = tmp_path / "engine"
    FolderEngine.model = tiny_folder(tmp_path / "model")
    FolderEngine.points = Points(None)

    def serving(second=FolderEngine, **settings):
        kinds = {URLS[0]: FolderEngine, URLS[1]: second}
        monkeypatch.setattr(engines, "EngineAdmin", lambda url: kinds[url](url))
        recipe = Recipe(model=tmp_path / "model", steps=1, **settings)
        both = Engines(",".join(URLS))
        return Serving(recipe, both, tmp_path / "published", tmp_path / "run")

    return serving


@pytest.fixture
def served(tmp_path):
    """A function: the names of the adapters, or of the weights, that each engine serves."""

    def served(pattern="version"):
        found = []
        for port in ("9", "10"):
            files = sorted((tmp_path / "engine" / port).glob(pattern))
            found.append([file.read_text() if file.is_file() else file.name for file in files])
        return found

    return served


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
    serving, stepped
):
    message = (
        r"^the engine at http://127\.0\.0\.1:10: .*1a2b3c4d\.1\.0 .* by \d.* nats .*limit is"
        r" 0\.001: .*max_diff"
    )
    with pytest.raises(EngineError, match=message):
        serving(Deaf).publish(stepped, "1a2b3c4d.1.0")
    assert stepped.logged.pop("engine_difference") > 1e-3
    # the recipe may allow it
    serving(Deaf, max_difference=100.0).publish(stepped, "1a2b3c4d.1.0")
    assert stepped.logged["engine_difference"] > 1e-3


def test_weights_without_agreement_are_never_the_policy_and_the_engines_go_back(
    serving, trainer, served, tmp_path
):
    published = serving(max_difference=1e-6)
    published.publish(trainer, "1a2b3c4d.0.0")
    trainer.differs = 1
    with pytest.raises(EngineError, match=r"all engines serve the weights 1a2b3c4d\.0\.0"):
        published.publish(trainer, "1a2b3c4d.1.0")
    assert json.loads((tmp_path / "run" / "policy.json").read_text())["version"] == "1a2b3c4d.0.0"
    assert served() == [["1a2b3c4d.0.0"]] * 2


# peft 0.21 uses a name that transformers 5.23 deprecates
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
class TestTheLastAdapter:
    @pytest.fixture
    def adapted(self, trainer):
        trainer.model = get_peft_model(trainer.model, lora())
        return trainer

    def test_it_alone_stays_loaded_from_the_run_folder(self, serving, adapted, served, tmp_path):
        published = serving(publish="lora", publish_folder=tmp_path)
        for step in range(3):
            published.publish(adapted, f"1a2b3c4d.{step}.0")
        published.publish(adapted, "1a2b3c4d.3.0", last=True)
        assert served("policy-*") == [["policy-1a2b3c4d.3.0"]] * 2
        last = tmp_path / "run" / "published" / "policy-1a2b3c4d.3.0"
        assert last.is_dir()
        assert FolderEngine.loaded[-1] == last

    def test_engines_that_do_not_see_the_run_folder_get_it_as_before(
        self, serving, adapted, served, tmp_path, caplog
    ):
        published = serving(Elsewhere, publish="lora", publish_folder=tmp_path)
        published.publish(adapted, "1a2b3c4d.3.0", last=True)
        assert served("policy-*") == [["policy-1a2b3c4d.3.0"]] * 2
        assert "cannot be loaded from the run folder: no such folder" in caplog.text


class TestSteps:
    @pytest.fixture
    def console(self):
        return Console(record=True, width=1000)

    @pytest.fixture
    def begun(self, serving, trainer, console):
        """Return a function that verifies engines, whose tokens differ by so much from the
        trainer's."""

        def begun(differs=0.0, dtype="bfloat16", **settings):
            trainer.differs = differs
            started = serving(dtype=dtype, **settings)
            started.verify_base(trainer, "1a2b3c4d.0.0", console)
            return started

        return begun

    def metrics(self, tokens=1000.0, **kinds):
        metrics = {}
        for kind, value in kinds.items():
            metrics[f"difference/{kind}"] = value
            metrics[f"tokens/{kind}"] = tokens
        return metrics

    def test_the_difference_of_the_base_weights_is_printed_with_the_limits_that_follow_from_it(
        self, begun, console
    ):
        begun(0.011)
        printed = console.export_text()
        assert (
            "by 1.1e-02 nats on average; more than 3.3e-02 is a warning, more than 0.1 ends the"
            " training" in printed
        )
        begun()
        assert (
            "more than 1.0e-02 is a warning" in console.export_text()
        )  # a tenth of the limit in any case

    def test_the_first_step_is_printed_and_is_no_warning_where_rounding_explains_it(
        self, begun, console
    ):
        started = begun(0.011)
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
        started = begun(0.011)
        started.check_step(0, self.metrics(root=0.02, bridged=0.05), console)
        (warning,) = [
            line for line in console.export_text().splitlines() if line.startswith("warning")
        ]
        assert "after a bridged prompt differs from the trainer's by 5.0e-02 nats" in warning
        assert warning.endswith("rounding explains 3.3e-02")

    @pytest.mark.parametrize("differs", [0.32, float("nan"), float("inf")])
    def test_more_than_the_limit_ends_the_training(self, begun, console, differs):
        started = begun(0.011)
        with pytest.raises(
            EngineError,
            match=r"step 4: .* after a bridged prompt .*limit is 0\.1: .* max_difference",
        ):
            started.check_step(3, self.metrics(root=0.02, bridged=differs), console)
        allowing = begun(0.011, max_difference=1.0)
        allowing.check_step(3, self.metrics(bridged=0.32), console)

    def test_a_few_tokens_alone_end_nothing(self, begun, console):
        begun().check_step(3, self.metrics(63.0, bridged=0.32), console)
        assert "warning: step 4: " in console.export_text()

    def test_a_few_tokens_of_each_step_end_it_together(self, begun, console):
        started = begun()
        for step in range(3):
            started.check_step(step, self.metrics(20.0, bridged=0.32, root=0.01), console)
        with pytest.raises(EngineError, match=r"step 4: .* after a bridged prompt"):
            started.check_step(3, self.metrics(20.0, bridged=0.32, root=0.01), console)

    def test_a_step_of_older_weights_says_nothing(self, begun, console):
        started = begun()
        console.export_text()
        started.check_step(3, {"off_policy/bridged": 2.0, "tokens/bridged": 100.0}, console)
        assert console.export_text() == ""


def test_adapters_of_ended_trainings_are_unloaded_at_the_start(serving, trainer, served, tmp_path):
    started = serving()
    for name in ("policy-22222222.1.0", "policy-1a2b3c4d.1.0"):
        (tmp_path / "engine" / "9" / name).mkdir()
    with started.engines.claimed("1a2b3c4d", "here"):
        started.verify_base(trainer, "1a2b3c4d.0.1", Console())
    assert served("policy-*") == [["policy-1a2b3c4d.1.0"], []]


def test_an_engine_with_other_weights_gets_those_of_the_recipes_model(serving, trainer, served):
    console = Console(record=True, width=1000)
    file = FolderEngine(URLS[1]).place / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] *= 2
    save_file(weights, file)
    serving().verify_base(trainer, "1a2b3c4d.0.0", console)
    assert served() == [["default"], ["1a2b3c4d.0.0"]]
    said = "http://127.0.0.1:10 serves the weights default, which differ from"
    assert said in console.export_text()


def test_an_engine_with_two_words_swapped_in_its_vocabulary_is_named(serving, trainer, tmp_path):
    started = serving()
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "model", other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words["w5"], words["w6"] = words["w6"], words["w5"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    FolderEngine.model = other
    vocabulary = "whose vocabulary is not that of"
    message = rf"engine at http://127\.0\.0\.1:9 serves .*other, {vocabulary} .*model: start"
    with pytest.raises(EngineError, match=message):
        started.verify_base(trainer, "1a2b3c4d.0.0", Console())


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
