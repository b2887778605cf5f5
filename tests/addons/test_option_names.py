import re
import subprocess
import sys

import pytest

from rolltap.addons.errors import InputError
from rolltap.addons.option_names import TYPES, require_options

DECLARED = """
import asyncio
from mitmproxy.options import Options
from mitmproxy.tools.dump import DumpMaster
from rolltap.addons import record

async def main():
    master = DumpMaster(Options())
    master.addons.add(*record.addons)
    print({name: option.typespec for name, option in master.options.items() if name.startswith("rolltap_")})

asyncio.run(main())
"""
"""In a process of its own: the script keeps torch from being imported."""


def test_the_names_and_types_are_those_that_the_addons_declare():
    ended = subprocess.run([sys.executable, "-c", DECLARED], capture_output=True, text=True)
    assert sorted(re.findall(r"'(rolltap_\w+)': (.+?)[,}]", ended.stdout)) == sorted(
        (name, str(kind)) for name, kind in TYPES.items()
    ), ended.stderr


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("rolltap_samplin", "rolltap_sampling"),
        ("rolltap_max_call", "rolltap_max_calls"),
        ("rolltap_Patience", "rolltap_patience"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name, nearest):
    with pytest.raises(InputError, match=f"^recorder.{re.escape(name)} is no option .*: did you mean {nearest}"):
        require_options({"rolltap_patience": "1", name: "x"}, "recorder.")


@pytest.mark.parametrize("name", ["rolltap_colour", "noeq"])
def test_a_name_that_resembles_none_gets_no_other_one(name):
    with pytest.raises(InputError, match=f"^{name} is no option of the recorder: see addons/README.md"):
        require_options({name: "x"})


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"sslinsecure": "true"}, "sslinsecure is no option of the recorder: did you mean ssl_insecure"),
        ({"rolltap_patience": "abc"}, "rolltap_patience is 'abc': .*integer"),
        ({"ssl_insecure": "yes"}, "ssl_insecure is 'yes': .*oolean must be"),
        ({"listen_port": "abc"}, "listen_port is 'abc': .*integer"),
        ({"rolltap_fsync": ["call", "never"]}, "rolltap_fsync is 'call', 'never': .*multiple values"),
    ],
)
def test_mitmproxys_options_and_the_types_of_all_are_checked_too(options, refused):
    with pytest.raises(InputError, match=f"^at {refused}"):
        require_options(options, "at ")


def test_without_mitmproxy_its_options_are_left_to_the_recorder(monkeypatch):
    monkeypatch.setattr("rolltap.addons.option_names.find_spec", lambda name: None)
    require_options({"listen_prt": "1", "rolltap_patience": "abc"})


def test_right_options_are_accepted():
    require_options({"rolltap_allow": ["pypi.org", "a.b"], "rolltap_max_calls": "3", "http2": "true", "confdir": "x"})
    require_options({name: "1" if kind is int else "true" if kind is bool else "" for name, kind in TYPES.items()})
