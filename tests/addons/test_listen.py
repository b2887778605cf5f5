import pytest
from mitmproxy import exceptions
from mitmproxy.test import taddons

from rolltap.addons.listen import Listen
from rolltap.addons.sessions import Sessions

SECRET = "key"


@pytest.fixture
async def context(monkeypatch):
    monkeypatch.delenv("ROLLTAP_SECRET", raising=False)
    with taddons.context() as context:
        yield context


def test_it_listens_on_loopback_unless_told_otherwise(context):
    context.master.addons.add(Sessions([].append), Listen())
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
        ({"listen_host": "0.0.0.0", "rolltap_secret": SECRET}, True),
        ({"mode": ["regular@0.0.0.0:9"], "rolltap_secret": SECRET}, True),
    ],
)
def test_other_machines_are_let_in_with_a_secret_only(context, options, accepted):
    listen = Listen()
    context.master.addons.add(Sessions([].append), listen)
    if accepted:
        context.configure(listen, **options)
    else:
        with pytest.raises(exceptions.OptionsError, match=r"other machines can reach: set rolltap_secret, or"):
            context.configure(listen, **options)
