import gc
import logging
import re
import sys
from functools import partial

import pyarrow
import pytest
from mitmproxy import ctx, exceptions
from mitmproxy.addons.proxyserver import Proxyserver
from mitmproxy.test import taddons

from rolltap.addons.options import NEUTRAL_SAMPLING
from rolltap.addons.recorder import Recorder
from rolltap.addons.store.metadata import RUN_FILE, read_metadata, write_metadata
from rolltap.addons.store.records import Event
from tests.addons.running import options_of, own_pauses, running


@pytest.fixture
def options(tmp_path, tokenizer_folder):
    return options_of(tmp_path, tokenizer_folder)


@pytest.fixture
async def recorder(options):
    """Yield a running recorder."""
    async with running(options) as recorder:
        yield recorder


def test_objects_of_start_up_are_not_garbage_collected_again_and_threads_give_way():
    loaded = [[]]
    thresholds = gc.get_threshold()
    interval = sys.getswitchinterval()
    with own_pauses():
        Recorder().running()
        assert not any(known is loaded for known in gc.get_objects())
        assert gc.get_threshold()[0] > thresholds[0]
        assert sys.getswitchinterval() < interval
    assert any(known is loaded for known in gc.get_objects())


def update(mitmproxy, options, **changes):
    mitmproxy.update(**{**options, **changes})


class TestOptions:
    """Options are checked at start-up. mitmdump exits when an error is logged then."""

    @pytest.fixture
    async def configure(self, options):
        recorder = Recorder()
        with own_pauses(), taddons.context(Proxyserver(), recorder) as context:
            yield partial(update, context.options, options)
            recorder.running()
            await recorder.done()

    @pytest.mark.parametrize(
        ("name", "value", "words"),
        [
            ("rolltap_out", "", r"rolltap_out is not set: add --set rolltap_out="),
            ("rolltap_model", "", r"rolltap_model is not set: add --set rolltap_model="),
            ("rolltap_engine", "http://", r"rolltap_engine is 'http://': give a URL"),
            ("rolltap_model", "{tmp}", r"rolltap_model, .*: the folder .* has no tokenizer"),
            ("rolltap_renderer", "gpt-oss", r"rolltap_renderer, .*: cannot use the renderer"),
            ("rolltap_tool_parser", "gpt", r"no tool parser 'gpt': choose auto, hermes"),
            ("rolltap_sampling", "{", r"rolltap_sampling is not JSON"),
            ("rolltap_sampling", "[1]", r"rolltap_sampling is \[1\]: .* a valid dictionary"),
            ("rolltap_sampling", '{"temp": 1}', r"rolltap_sampling.temp is unknown: use temp"),
            ("rolltap_sampling", '{"top_k": true}', r"rolltap_sampling.top_k is True: Input"),
            ("rolltap_out", "{tmp}/file", r"rolltap_out: .*file"),
            ("rolltap_images", "show", r"rolltap_images is 'show': .*'hide' or 'refuse'"),
        ],
    )
    def test_a_refusal_names_the_option_its_value_and_what_to_do(
        self, configure, caplog, tmp_path, name, value, words
    ):
        (tmp_path / "file").touch()
        configure(**{name: value.replace("{tmp}", str(tmp_path))})
        (refusal,) = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert re.search(words, refusal.message)
        assert not (tmp_path / "run").exists()

    def test_the_run_of_another_model_is_refused(self, configure, caplog, tmp_path):
        write_metadata(tmp_path / "run", {"tokenizer_sha256": "other"})
        configure()
        assert re.search(r"rolltap_out: .* another tokenizer: choose a new folder", caplog.text)

    def test_they_cannot_change_while_a_run_is_recorded_and_others_can(self, recorder, caplog):
        ctx.options.update(stream_large_bodies="1m")
        assert caplog.text == ""
        with pytest.raises(exceptions.OptionsError, match="cannot change while a run is recorded"):
            ctx.options.update(rolltap_sampling='{"temperature": 0.5}')
        assert ctx.options.rolltap_sampling == ""

    def test_a_template_that_no_renderer_knows_is_warned_of(
        self, configure, caplog, tmp_path, save_tokenizer
    ):
        texts = "{% for message in messages %}{{ message.content }}{% endfor %}"
        model = save_tokenizer(tmp_path / "model", texts)
        configure(rolltap_model=model, rolltap_renderer="auto")
        assert "rolltap_tool_parser" in caplog.text
        assert "rolltap_renderer" in caplog.text


class TestRun:
    def test_its_metadata_says_how_it_was_recorded(self, recorder, options, rendering):
        metadata = read_metadata(recorder.endpoint.writer.run)
        assert (metadata["model"], metadata["renderer"]) == (options["rolltap_model"], "qwen3")
        assert metadata["tokenizer_sha256"] == rendering.digests["tokenizer_sha256"]
        (row,) = metadata["recorders"]
        assert (row["engines"], row["sampling"]) == (["http://127.0.0.1:1"], NEUTRAL_SAMPLING)
        assert row["versions"]["pyarrow"] == pyarrow.__version__

    def test_a_run_that_cannot_be_written_to_is_logged(self, recorder, tmp_path, caplog):
        run = recorder.endpoint.writer.run
        (run / RUN_FILE).unlink()
        run.rmdir()
        recorder.record(Event(kind="refused"))
        assert f"cannot write to {run}" in caplog.text


async def test_what_differs_from_the_defaults_is_recorded(options):
    sampling = '{"temperature": 0.7, "max_tokens": 64}'
    changes = {
        "rolltap_sampling": sampling,
        "rolltap_keep_adapter": False,
        "rolltap_max_sampled_tokens": 500,
    }
    async with running({**options, **changes}) as recorder:
        pass
    (row,) = read_metadata(recorder.endpoint.writer.run)["recorders"]
    assert row["sampling"] == {**NEUTRAL_SAMPLING, "temperature": 0.7, "max_tokens": 64}
    assert (row["keep_adapter"], row["accept_rewards"]) == (False, False)
    assert (row["limits"]["max_sampled_tokens"], row["limits"]["max_calls"]) == (500, 0)
