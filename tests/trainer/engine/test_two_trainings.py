"""Two trainings that publish adapters to one engine, with a folder in place of the engine."""

import pytest
from peft import get_peft_model

from rolltap.trainer.engine import publish
from rolltap.trainer.engine.publish import LoraPublisher
from tests.trainer.grpo.tiny import tiny_model
from tests.trainer.training.stand_ins import FolderEngine, Points, lora


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_training_unloads_its_own_adapters_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "EngineAdmin", FolderEngine)
    monkeypatch.setattr(FolderEngine, "folder", tmp_path / "engine", raising=False)
    monkeypatch.setattr(FolderEngine, "points", Points(None), raising=False)
    for run in ("one", "two"):
        (tmp_path / run).mkdir()
    model = get_peft_model(tiny_model(), lora())
    other = LoraPublisher("http://e", tmp_path / "other", tmp_path / "one")
    other.publish(model, "1a2b3c4d.7.0")
    publisher = LoraPublisher("http://e", tmp_path / "own", tmp_path / "two")
    for step in range(3):
        publisher.publish(model, f"00000000.{step}.0")
    loaded = {"policy-1a2b3c4d.7.0", "policy-00000000.1.0", "policy-00000000.2.0"}
    assert publisher._engine.models().adapters == loaded
