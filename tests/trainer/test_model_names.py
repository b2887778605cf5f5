import pytest

from rolltap.trainer.versions import public_model


@pytest.mark.parametrize(
    ("model", "public"),
    [
        ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B"),
        ("/home/me/models/qwen3-4b", "qwen3-4b"),
        ("./models/qwen3-4b", "qwen3-4b"),
        (
            "/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-4B/snapshots/1cfa9a7208912126459214e8b04321603b3df60c",
            "Qwen/Qwen3-4B",
        ),
        ("/c/models--a-b--c--d/snapshots/0a/", "a-b/c--d"),
        ("tiny", "tiny"),
        ("", ""),
    ],
)
def test_a_model_has_its_name_on_the_hub_or_that_of_its_folder(model, public):
    assert public_model(model) == public


def test_a_folder_that_looks_like_a_name_is_no_name_on_the_hub(tmp_path, monkeypatch):
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert public_model("models/mine") == "mine"
