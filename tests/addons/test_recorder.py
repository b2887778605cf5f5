import gc
import sys

from rolltap.addons.recorder import Startup


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
