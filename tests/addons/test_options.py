import re

import pytest
from mitmproxy.options import Options
from mitmproxy.optmanager import _UnconvertedStrings
from mitmproxy.tools.dump import DumpMaster

from rolltap.addons.capture import Capture
from rolltap.addons.egress import Egress
from rolltap.addons.options import declared, unknown_options, wrong_values


@pytest.fixture
async def options(tmp_path):
    """Return the options of mitmdump, as they are when the script's addons have declared theirs."""
    master = DumpMaster(Options(confdir=str(tmp_path)))
    master.addons.add(Egress(lambda event: None, lambda client: None), Capture())
    return master.options


def given(options, **values):
    """Set options that are not known yet, as `--set` does."""
    options.deferred.update({name: _UnconvertedStrings(texts) for name, texts in values.items()})


async def test_names_that_nobody_declares_are_refused_with_the_nearest_one(options):
    given(options, rolltap_alow=["pypi.org"], rolltap_allow=["pypi.org"], listen_prt=["1"], nonsense=["1"])
    refused = unknown_options(options)
    assert refused[0] == "rolltap_alow is no option of the recorder: did you mean rolltap_allow?"
    assert refused[1] == "listen_prt is no option of the recorder: did you mean listen_port?"
    assert len(refused) == 3


async def test_an_option_of_another_script_may_be_declared_later(options, tmp_path):
    (tmp_path / "record.py").touch()
    (tmp_path / "mine.py").touch()
    options.update(scripts=[str(tmp_path / "record.py"), str(tmp_path / "mine.py")])
    given(options, mine_size=["1"], rolltap_alow=["x"])
    assert [line.split()[0] for line in unknown_options(options)] == ["rolltap_alow"]


async def test_options_of_mitmproxys_other_programs_may_be_in_its_configuration_file(options, tmp_path):
    (tmp_path / "config.yaml").write_text("console_palette: dark\nrolltap_alow: x\n")
    options.deferred.update({"console_palette": "dark", "rolltap_alow": "x"})
    assert [line.split()[0] for line in unknown_options(options)] == ["rolltap_alow"]


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("rolltap_patience", ["abc"], "rolltap_patience is 'abc': .*integer"),
        ("rolltap_patience", ["1.5"], "rolltap_patience is '1.5': .*integer"),
        ("rolltap_patience", [""], "rolltap_patience is '': Option is required"),
        ("rolltap_keep_adapter", ["maybe"], "rolltap_keep_adapter is 'maybe': .*oolean"),
        ("rolltap_out", ["a", "b"], "rolltap_out is 'a', 'b': .*multiple values"),
    ],
)
async def test_a_value_of_a_wrong_type_is_refused_with_its_name(options, name, values, words):
    given(options, **{name: values}, rolltap_fsync=["call"], nonsense=["1"])
    (refused,) = wrong_values(options)
    assert re.search(words, refused)


async def test_a_value_of_a_wrong_type_in_the_configuration_file_is_refused_too(options):
    options.deferred["rolltap_patience"] = "abc"
    assert re.search("rolltap_patience is 'abc': ", *wrong_values(options))


async def test_the_options_that_are_known_before_a_start_are_those_of_mitmdump():
    mitmdumps = DumpMaster(Options()).options
    known = {name: option.typespec for name, option in declared().items() if not name.startswith("rolltap_")}
    assert known == {name: option.typespec for name, option in mitmdumps.items()}
