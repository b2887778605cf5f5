import gc

from rolltap.addons.startup import Startup


def test_what_was_loaded_is_not_collected_again():
    loaded = [[]]
    Startup().running()
    try:
        assert not any(known is loaded for known in gc.get_objects())
    finally:
        gc.unfreeze()
    assert any(known is loaded for known in gc.get_objects())
