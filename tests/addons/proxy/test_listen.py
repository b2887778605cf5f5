import json
import logging
from types import SimpleNamespace

import pytest
from mitmproxy import ctx, exceptions
from mitmproxy.test import taddons

from rolltap.addons.proxy.listen import Listen
from rolltap.addons.proxy.sessions import Sessions
from rolltap.addons.recorder import Recorder


@pytest.fixture
async def context():
    with taddons.context(Recorder()) as context:
        yield context


@pytest.fixture
def listen(context):
    listen = Listen(context.master.addons.get("recorder"))
    context.master.addons.add(Sessions([].append), listen)
    return listen


def test_it_listens_on_loopback_unless_told_otherwise(context, listen):
    assert context.options.listen_host == "127.0.0.1"


@pytest.mark.parametrize(
    ("options", "accepted"),
    [
        ({"listen_host": "localhost"}, True),
        ({"listen_host": "::1"}, True),
        ({"listen_host": "127.1.2.3"}, True),
        ({"listen_host": ""}, False),
        ({"listen_host": "0.0.0.0"}, False),
        ({"listen_host": "::"}, False),
        ({"listen_host": "192.168.0.7"}, False),
        ({"listen_host": "example.com"}, False),
        ({"mode": ["regular", "regular@0.0.0.0:9"]}, False),
        ({"mode": ["regular@127.0.0.1:9"], "listen_host": "0.0.0.0"}, True),
        ({"listen_host": "0.0.0.0", "rolltap_secret_file": "secret"}, True),
        ({"mode": ["regular@0.0.0.0:9"], "rolltap_secret_file": "secret"}, True),
    ],
)
def test_other_machines_are_let_in_with_a_secret_only(
    context, listen, caplog, tmp_path, options, accepted
):
    (tmp_path / "secret").write_text("key")
    (tmp_path / "secret").chmod(0o600)
    if "rolltap_secret_file" in options:
        options = {**options, "rolltap_secret_file": str(tmp_path / "secret")}
    context.configure(listen, **options)
    refusals = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert (refusals == []) == accepted
    for refusal in refusals:
        assert "other machines can reach: set rolltap_secret_file, or" in refusal


@pytest.mark.parametrize(
    "mode", ["dns@127.0.0.1:9", "reverse:tcp://a.example:1", "upstream:http://a.example", "socks5"]
)
def test_other_modes_are_refused(context, listen, caplog, mode):
    context.configure(listen, mode=[mode])
    assert caplog.messages == [f"the mode is {mode!r}: rolltap records in the mode `regular` only"]


class Proxyserver:
    name = "proxyserver"

    def listen_addrs(self):
        return [("127.0.0.1", 8080)]


class TestReady:
    @pytest.fixture
    async def announce(self, context):
        async def announce(ready):
            recorder = context.master.addons.get("recorder")
            recorder.endpoint = SimpleNamespace(warnings=["another model"])
            listen = Listen(recorder)
            context.master.addons.add(Proxyserver(), Sessions([].append), listen)
            context.configure(listen, rolltap_ready=str(ready))
            listen.running()
            await listen._announcing
            return listen

        return announce

    async def test_the_address_is_written_once_calls_can_be_taken(self, announce, tmp_path):
        await announce(tmp_path / "ready.json")
        announced = {"host": "127.0.0.1", "port": 8080, "warnings": ["another model"]}
        assert json.loads((tmp_path / "ready.json").read_text()) == announced

    async def test_a_later_change_to_an_open_address_is_refused(self, context, announce):
        listen = await announce("")
        with pytest.raises(
            exceptions.OptionsError, match="other machines can reach: set rolltap_secret_file, or"
        ):
            context.configure(listen, listen_host="0.0.0.0")
        assert ctx.options.listen_host == "127.0.0.1"

    async def test_a_file_that_cannot_be_written_stops_the_recorder_with_a_message(
        self, announce, tmp_path, caplog
    ):
        await announce(tmp_path / "nowhere" / "ready.json")
        assert "rolltap_ready: [Errno 2] No such file or directory" in caplog.text
        assert ctx.master.should_exit.is_set()
