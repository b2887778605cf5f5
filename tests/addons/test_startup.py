import gc
import sys

from mitmproxy.addons.proxyserver import Proxyserver
from mitmproxy.test import taddons

from rolltap.addons.egress import Egress
from rolltap.addons.startup import Startup


def test_objects_of_start_up_are_not_garbage_collected_again_and_threads_give_way():
    loaded, thresholds, interval = [[]], gc.get_threshold(), sys.getswitchinterval()
    Startup().running()
    try:
        assert not any(known is loaded for known in gc.get_objects())
        assert gc.get_threshold()[0] > thresholds[0]
        assert sys.getswitchinterval() < interval
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)
    assert any(known is loaded for known in gc.get_objects())


async def test_an_option_that_is_misspelt_is_an_error_that_names_the_nearest(caplog):
    with taddons.context(Proxyserver(), Egress(lambda event: None, lambda client: None)) as context:
        context.options.deferred.update({"rolltap_alow": "pypi.org", "rolltap_allow": ["pypi.org"], "other": "1"})
        Startup().load(None)
    assert caplog.messages == ["rolltap_alow is no option of the recorder: did you mean rolltap_allow?"]
