"""An agent sends a WebSocket message that would fill or freeze the recorder."""

from tests.security.raw import News, credentials, listening, plain, read_head, recording

SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n\x81\x03abc"


def test_a_message_of_an_accepted_websocket_is_bounded(tmp_path, tokenizer, tokenizer_folder):
    with (
        listening("127.0.0.3", answer=SWITCHED) as outside,
        recording(tmp_path, tokenizer, tokenizer_folder, "rolltap_allow=127.0.0.3:*") as recorder,
        plain(recorder) as connection,
    ):
        news = News(recorder)
        own = b"127.0.0.3:%d" % outside.port
        connection.sendall(
            b"GET http://" + own + b"/ HTTP/1.1\r\nHost: " + own + b"\r\nConnection: upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
            b"Sec-WebSocket-Extensions: permessage-deflate\r\n" + credentials() + b"\r\n"
        )
        assert read_head(connection).startswith(b"HTTP/1.1 101")
        assert connection.recv(100) == b"\x81\x03abc"
        connection.sendall(b"\x81\x85\x00\x00\x00\x00hello")  # a whole message passes
        message = b"\x01\xff" + (1 << 40).to_bytes(8) + bytes(4)  # the head of a message of a terabyte
        try:
            connection.sendall(message)
            for _ in range(100):
                connection.sendall(bytes(1 << 20))
            sent = True
        except ConnectionError:
            sent = False
        assert not sent
        (received,) = outside.connections
        assert b"permessage-deflate" not in received
        assert len(received) < 10_000
        assert [detail for _, detail in news()] == ["a WebSocket message over 16777216 bytes"]
        assert recorder.stop() == 0
        assert "Traceback" not in recorder.log()
