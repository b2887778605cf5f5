import re
import subprocess
import sys

import pytest

from rolltap.addons.errors import InputError
from rolltap.addons.option_names import NAMES, require_known

DECLARED = """
import asyncio
from mitmproxy.options import Options
from mitmproxy.tools.dump import DumpMaster
from rolltap.addons import record

async def main():
    master = DumpMaster(Options())
    master.addons.add(*record.addons)
    print(*(name for name in master.options.keys() if name.startswith("rolltap_")))

asyncio.run(main())
"""
"""In a process of its own: the script keeps torch from being imported."""


def test_the_names_are_those_that_the_addons_declare():
    ended = subprocess.run([sys.executable, "-c", DECLARED], capture_output=True, text=True)
    assert set(ended.stdout.split()) == NAMES, ended.stderr


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
        require_known(["rolltap_patience", name], "recorder.")


def test_mitmproxys_own_names_are_left_to_mitmdump():
    require_known(["listen_prt", "upstream_cert", *NAMES])
