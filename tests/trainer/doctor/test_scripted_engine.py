import socket

import pytest

from tests.scripted_engine import ScriptedEngine


def test_a_port_that_is_taken_is_an_error_and_no_wait(tokenizer):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        engine = ScriptedEngine(tokenizer, port=taken.getsockname()[1])
        with pytest.raises(OSError, match="address already in use"), engine:
            pass
