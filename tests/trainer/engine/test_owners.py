"""The owner of an engine, in the engine's register and asked by its client."""

import asyncio
import json
from threading import Event

import pytest

from rolltap.addons.errors import EngineError
from rolltap.trainer.engine import admin
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.engine.in_vllm.rolltap_owner import PATH, OneOwner
from rolltap.trainer.engine.owners import Owner, claim, release

ONE, TWO = Owner("11111111", "host one, /runs/one"), Owner("22222222", "host two, /runs/two")


async def passed(scope, receive, send):
    await send({"type": "passed"})


def asked(register, method, body=b"", path=PATH, kind="http"):
    """Return the status and the answer to a request whose body arrives in two parts."""
    parts = [{"body": body[:3], "more_body": True}, {"body": body[3:]}]
    sent = []

    async def receive():
        return parts.pop(0)

    async def send(message):
        sent.append(message)

    asyncio.run(register({"type": kind, "path": path, "method": method}, receive, send))
    return (
        sent if path != PATH or kind != "http" else (sent[0]["status"], json.loads(sent[1]["body"]))
    )


class TestTheRegister:
    @pytest.fixture
    def register(self):
        return OneOwner(passed)

    def test_the_first_training_gets_the_engine_and_a_second_one_is_told_who_has_it(self, register):
        assert asked(register, "GET") == (200, {"owner": None, "about": None, "base": None})
        first = (200, {"owner": "a", "about": "one", "base": None})
        assert asked(register, "PUT", b'{"owner": "a", "about": "one"}') == first
        for method, body in (
            ("PUT", b'{"owner": "b", "about": "two", "steal": false}'),
            ("DELETE", b'{"owner": "b"}'),
        ):
            assert asked(register, method, body) == (409, first[1])
        assert asked(register, "DELETE", b'{"owner": "b", "steal": true}')[0] == 409
        assert asked(register, "GET") == first
        later = {"owner": "a", "about": "later", "base": None}
        assert asked(register, "PUT", b'{"owner": "a", "about": "later"}') == (200, later)

    def test_an_engine_is_given_back_and_stolen(self, register):
        asked(register, "PUT", b'{"owner": "a"}')
        assert asked(register, "PUT", b'{"owner": "b", "steal": true}')[1]["owner"] == "b"
        for _ in range(2):
            nobody = {
                "owner": None,
                "about": "",
                "base": None,
            }  # for people: where the last one ran
            assert asked(register, "DELETE", b'{"owner": "b"}') == (200, nobody)

    @pytest.mark.parametrize(
        "body",
        [
            *(b"", b"\xff", b"[]", b"7", b"{}", b"[" * 100_000),
            b'{"owner": "a", "base": 7}',
            *(
                b'{"owner": ""}',
                b'{"owner": 7}',
                b'{"owner": "a", "about": 7}',
                b'{"owner": "a", "steal": "yes"}',
            ),
        ],
    )
    def test_what_is_not_a_claim_changes_nothing(self, register, body):
        asked(register, "PUT", b'{"owner": "a"}')
        assert asked(register, "PUT", body) == (400, {"owner": "a", "about": "", "base": None})

    def test_the_verified_base_model_is_known_as_long_as_the_engine_runs(self, register):
        asked(register, "PUT", b'{"owner": "a", "base": "/models/tiny"}')
        asked(register, "PUT", b'{"owner": "a"}')
        asked(register, "DELETE", b'{"owner": "a"}')
        assert asked(register, "GET") == (200, {"owner": None, "about": "", "base": "/models/tiny"})

    def test_other_methods_and_paths_are_not_its_own(self, register):
        assert asked(register, "POST")[0] == 405
        assert asked(register, "PUT", path="/rolltap/owner/") == [{"type": "passed"}]
        assert asked(register, "GET", kind="websocket") == [{"type": "passed"}]


class TestTheClient:
    @pytest.fixture
    def engine(self, answering):
        return EngineAdmin(answering.url)

    def test_a_claim_of_an_engine_that_another_training_owns_names_it_and_the_way_out(
        self, answering, engine
    ):
        answering.answers[PATH] = (409, json.dumps({"owner": ONE.run, "about": ONE.about}))
        with pytest.raises(
            EngineError, match=r"owns the engine at .*: 11111111 \(host one, /runs/one\).*--steal"
        ):
            claim(engine, TWO)
        answering.answers[PATH] = (200, "<html>")
        with pytest.raises(EngineError, match="it is not vLLM"):
            claim(engine, ONE)
        del answering.answers[PATH]  # a vLLM without a register is nobody's
        assert claim(engine, ONE) is False
        release(engine, ONE)

    def test_a_stuck_engine_does_not_hold_up_the_end_of_a_training(
        self, answering, engine, monkeypatch
    ):
        monkeypatch.setattr(admin, "_REGISTER_SECONDS", 0.01)
        end = Event()
        answering.answers[PATH] = lambda method, body: (end.wait(), (200, "{}"))[1]
        with pytest.raises(EngineError, match="did not answer in time"):
            release(engine, ONE)
        end.set()


@pytest.mark.engine
def test_a_real_engine_is_taken_given_back_and_stolen(engine):
    client = EngineAdmin(engine.url)
    assert claim(client, ONE) is True
    with pytest.raises(EngineError, match="11111111"):
        claim(client, TWO)
    assert claim(client, TWO, steal=True) is True
    release(client, ONE)  # it is not its owner any more
    with pytest.raises(EngineError, match="22222222"):
        claim(client, ONE)
    release(client, TWO)
    # the note of the verified base stays: it ends with the engine
    assert engine.http.get(PATH).json().items() >= {"owner": None, "about": TWO.about}.items()
