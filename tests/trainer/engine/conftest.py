import threading

import pytest

from tests.trainer.engine.answering import Answering


@pytest.fixture
def answering():
    with Answering() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()
