import subprocess
import sys
from pathlib import Path

import pytest
from mitmproxy.options import Options
from mitmproxy.optmanager import _UnconvertedStrings
from mitmproxy.test import taddons
from mitmproxy.tools.dump import DumpMaster

from rolltap.addons.errors import InputError
from rolltap.addons.options import OPTIONS, RecordedFrom, RecorderOptions, require_options
from rolltap.addons.recorder import Recorder, unknown_options


@pytest.fixture
async def options(tmp_path):
    """Return the options of mitmdump after it has loaded `Recorder`."""
    master = DumpMaster(Options(confdir=str(tmp_path)))
    master.addons.add(Recorder())
    return master.options


async def test_mitmproxy_has_them_with_their_types_and_fields_have_the_parsed_values(tmp_path):
    with taddons.context(Recorder()) as context:
        context.options.update(
            rolltap_out="run", rolltap_engine="http://a:1, http://b:2", rolltap_model="m"
        )
        context.options.update(
            rolltap_sampling='{"top_k": 5}', rolltap_allow=["pypi.org"], rolltap_keep_adapter=False
        )
        options = RecorderOptions.read(context.options)
    assert (options.engine, options.allow) == (("http://a:1", "http://b:2"), ("pypi.org",))
    assert (options.keep_adapter, options.patience, options.fsync) == (False, 120, "session")
    assert (options.sampling["top_k"], options.sampling["temperature"]) == (5, 1.0)


def test_the_trainer_checks_them_without_mitmproxy_or_pyarrow():
    code = (
        "import sys, rolltap.addons.options; sys.exit(bool({'mitmproxy', 'pyarrow'} &"
        " sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("rolltap_samplin", "did you mean rolltap_sampling"),
        ("rolltap_max_call", "did you mean rolltap_max_calls"),
        ("rolltap_Patience", "did you mean rolltap_patience"),
        ("rolltap_colour", "`mitmdump"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_if_it_resembles_one(name, advice):
    with pytest.raises(InputError, match=f"^at {name} is no option of the recorder: {advice}"):
        require_options({"rolltap_patience": "1", name: "x"}, "at ")


@pytest.mark.parametrize(
    ("name", "value", "refused"),
    [
        ("rolltap_patience", "abc", "rolltap_patience is 'abc': Input should be a valid integer"),
        ("rolltap_patience", "1.5", "rolltap_patience is '1.5': Input should be a valid integer"),
        ("rolltap_sampling", '{"temperature": -3}', "rolltap_sampling.temperature is -3: Input"),
        ("rolltap_sampling", '{"top_p": 0}', "rolltap_sampling.top_p is 0: Input"),
        ("rolltap_sampling", '{"top_p": "1"}', "rolltap_sampling.top_p is '1': Input"),
        ("rolltap_sampling", '{"max_tokens": 0}', "rolltap_sampling.max_tokens is 0: Input"),
        ("rolltap_sampling", '{"seed": 0.5}', "rolltap_sampling.seed is 0.5: Input"),
        ("rolltap_sampling", '{"temperature": NaN}', "rolltap_sampling.temperature is nan: "),
        ("rolltap_sampling", '{"temperature": 1e400}', "rolltap_sampling.temperature is inf: "),
        ("rolltap_patience", "", "rolltap_patience is '': Input should be a valid integer"),
        ("rolltap_max_calls", "-1", "rolltap_max_calls is -1: Input should be greater"),
        ("rolltap_max_sampled_tokens", "-1", "rolltap_max_sampled_tokens is -1: Input should be"),
        ("rolltap_keep_adapter", "maybe", "rolltap_keep_adapter is 'maybe': Input should be a"),
        ("rolltap_fsync", ["call", "never"], "rolltap_fsync is ['call', 'never']: give one text"),
        ("rolltap_fsync", "often", "rolltap_fsync is 'often': Input should be 'never', 'session'"),
        ("rolltap_engine", "", "rolltap_engine is not set"),
        ("rolltap_rerun", '{"run": "runs/a"}', "rolltap_rerun.session is {'run': 'runs/a'}: "),
    ],
)
def test_a_wrong_value_is_refused_before_a_start_with_its_name(name, value, refused):
    with pytest.raises(InputError) as error:
        require_options({name: value, "rolltap_renderer": "qwen3", "rolltap_samplin": "{}"}, "at ")
    assert f"at {refused}" in str(error.value)
    assert "at rolltap_samplin is no option" in str(error.value)


def test_right_options_are_accepted_and_those_of_mitmproxy_left_to_it():
    require_options(
        {
            "rolltap_allow": ["pypi.org", "a.b"],
            "rolltap_max_calls": "3",
            "http2": "x",
            "listen_prt": "1",
        }
    )
    options = require_options(
        {"rolltap_rerun": '{"run": "runs/a", "session": "s1"}', "rolltap_routing": "true"}
    )
    assert (options.rerun, options.routing) == (RecordedFrom(Path("runs/a"), "s1"), True)


def test_an_empty_text_is_not_set_and_a_whole_number_of_json_may_have_a_point():
    options = require_options(
        {"rolltap_renderer": "", "rolltap_sampling": '{"top_k": 5.0}', "rolltap_rerun": ""}
    )
    assert (options.renderer, options.sampling["top_k"], options.rerun) == ("auto", 5, None)


async def test_each_option_has_a_text_and_a_default_of_its_type_in_mitmproxy(options):
    for name in OPTIONS:
        option = options._options[name]
        assert option.help
        kind = option.typespec if isinstance(option.typespec, type) else tuple
        assert isinstance(option.default, kind)


async def test_an_option_of_another_script_may_be_declared_later(options, tmp_path):
    scripts = [tmp_path / "record.py", tmp_path / "mine.py"]
    for script in scripts:
        script.touch()
    options.update(scripts=[str(script) for script in scripts])
    options.deferred["mine_size"] = _UnconvertedStrings(["1"])
    assert unknown_options(options) == []
