import logging

import pytest
from mitmproxy import exceptions
from mitmproxy.test import taddons

from rolltap.addons.options import option_errors


class Proxyserver:
    name = "proxyserver"

    def __init__(self, is_running):
        self.is_running = is_running


def refuse():
    with option_errors():
        raise exceptions.OptionsError("rolltap_out is not set")


async def test_at_start_up_a_refused_setting_is_logged_as_an_error(caplog):
    with taddons.context(Proxyserver(is_running=False)):
        refuse()
    assert [(r.levelno, r.message, r.exc_info) for r in caplog.records] == [
        (logging.ERROR, "rolltap_out is not set", None)
    ]


@pytest.mark.parametrize("addons", [[Proxyserver(is_running=True)], []], ids=["while it runs", "without a proxy"])
async def test_otherwise_it_is_refused_as_mitmproxy_refuses_settings(addons):
    with taddons.context(*addons), pytest.raises(exceptions.OptionsError, match="rolltap_out is not set"):
        refuse()
