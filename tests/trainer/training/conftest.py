import gc

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def quick_trainings():
    """Make trainings of tiny models quick.

    Several threads cost more than they save. Accelerate collects garbage in each training, which
    takes most of a second when torch and TRL are imported: their objects are frozen.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)
