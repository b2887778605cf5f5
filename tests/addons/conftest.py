import shutil
import subprocess
import warnings
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rolltap.addons.endpoint.server import Endpoint
from rolltap.addons.prompts.rendering import Rendering
from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.tables import RunWriter
from tests.addons.harness import Harness

with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
    import mitmproxy.addons  # noqa: F401 - what it imports uses what others deprecate; tests take warnings as errors

TEMPLATE = Path(__file__).resolve().parents[2] / "recipes/quickstart/chat_template.jinja"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def save_tokenizer(folder, template, more=()):
    """A small byte-level BPE with Qwen3's special tokens, and `more` of them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [TEMPLATE.read_text()],
        trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in more])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        chat_template=template,
    ).save_pretrained(folder)


@pytest.fixture(scope="session")
def rendering_folder(tmp_path_factory):
    """A folder with a tokenizer and nothing else, for which `auto` finds the renderer `qwen3`."""
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder, TEMPLATE.read_text())
    return folder


@pytest.fixture(scope="session")
def rendering(rendering_folder):
    return Rendering(str(rendering_folder))


@pytest.fixture(scope="session")
def encode(rendering_folder):
    """Text to token ids."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(rendering_folder)
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture(scope="session")
def tiny_rendering(tokenizer_folder):
    return Rendering(str(tokenizer_folder))


@pytest.fixture
async def harness(tiny_rendering, scripted_engine, tmp_path):
    """A client of an endpoint behind the scripted engine, with no patience for an engine that fails."""
    write_metadata(tmp_path, {})
    writer = RunWriter(tmp_path)
    endpoint = Endpoint(tiny_rendering, [scripted_engine.url], writer, {}, patience=0)
    await endpoint.start()
    async with Harness.connect(endpoint) as client:
        yield client
    await endpoint.close()
    writer.close()


@pytest.fixture(scope="session")
def small_disk():
    """A function of a size and a folder: the head of a command whose process alone sees a disk of that size there."""

    def command(size, folder):
        mount = 'mount -t tmpfs -o "size=$0" none "$1" && shift && exec "$@"'
        return [*prefix, "sh", "-c", mount, size, folder]

    for options in ("-rm", "-m"):
        prefix = ["unshare", options]
        if (
            shutil.which("unshare")
            and subprocess.run([*command("1m", "/mnt"), "true"], capture_output=True).returncode == 0
        ):
            return command
    pytest.skip("this machine lets nobody mount a small disk")
