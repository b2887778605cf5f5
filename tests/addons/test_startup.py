import gc

from rolltap.addons.startup import Startup


def test_objects_of_start_up_are_not_garbage_collected_again():
    loaded, thresholds = [[]], gc.get_threshold()
    Startup().running()
    try:
        assert not any(known is loaded for known in gc.get_objects())
        assert gc.get_threshold()[0] > thresholds[0]
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
    assert any(known is loaded for known in gc.get_objects())
