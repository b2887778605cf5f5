import pytest

from tests.scripted_engine import Say


@pytest.fixture
def options(scripted_engine, tokenizer_folder, tmp_path):
    """The options that `rollout` and `record` need. Each call of the model is answered with 0.5."""
    scripted_engine.otherwise = lambda request: Say("0.5")
    return ["--out", tmp_path / "run", "--engine", scripted_engine.url, "--model", tokenizer_folder]


@pytest.fixture
def unreadable(options, tmp_path, save_tokenizer):
    """The `options`, whose model is one whose tool calls nothing can read."""
    template = "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"
    options[-1] = save_tokenizer(tmp_path / "model", template)
    return options
