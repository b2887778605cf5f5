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
from tests.trainer.engine.acting import ask_register

ONE = Owner("11111111", "host one, /runs/one")
TWO = Owner("22222222", "host two, /runs/two")
NOBODY = {"owner": None, "about": "", "base": None}


class TestTheRegister:
    @pytest.fixture
    def ask(self):
        register = OneOwner(None)

        def ask(method, **asked):
            return ask_register(register, method, json.dumps(asked).encode())

        return ask

    def test_the_first_training_gets_the_engine_and_a_second_one_is_told_who_has_it(self, ask):
        assert ask("GET") == (200, {"owner": None, "about": None, "base": None})
        first = {"owner": "a", "about": "one", "base": None}
        assert ask("PUT", owner="a", about="one") == (200, first)
        assert ask("PUT", owner="b", about="two", steal=False) == (409, first)
        assert ask("DELETE", owner="b") == (409, first)
        assert ask("DELETE", owner="b", steal=True) == (409, first)
        assert ask("GET") == (200, first)
        assert ask("PUT", owner="a", about="later") == (200, first | {"about": "later"})

    def test_an_engine_is_given_back_and_stolen(self, ask):
        ask("PUT", owner="a")
        assert ask("PUT", owner="b", steal=True) == (200, NOBODY | {"owner": "b"})
        for _ in range(2):
            # the text stays for people: where the last one ran
            assert ask("DELETE", owner="b") == (200, NOBODY)

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"\xff",
            b"[]",
            b"7",
            b"{}",
            b"[" * 100_000,
            b'{"owner": "a", "base": 7}',
            b'{"owner": ""}',
            b'{"owner": 7}',
            b'{"owner": "a", "about": 7}',
            b'{"owner": "a", "steal": "yes"}',
        ],
    )
    def test_what_is_not_a_claim_changes_nothing(self, body):
        register = OneOwner(None)
        _, owned = ask_register(register, "PUT", b'{"owner": "a"}')
        assert ask_register(register, "PUT", body) == (400, owned)

    def test_the_verified_base_model_is_known_as_long_as_the_engine_runs(self, ask):
        ask("PUT", owner="a", base="/models/tiny")
        ask("PUT", owner="a")
        ask("DELETE", owner="a")
        assert ask("GET") == (200, NOBODY | {"base": "/models/tiny"})

    def test_other_methods_and_paths_are_not_its_own(self, ask):
        assert ask("POST")[0] == 405
        passed = []

        async def app(scope, receive, send):
            passed.append(scope["path"])

        register = OneOwner(app)
        for kind, path in (("http", f"{PATH}/"), ("websocket", PATH)):
            asyncio.run(register({"type": kind, "path": path, "method": "PUT"}, None, None))
        assert passed == [f"{PATH}/", PATH]


class TestTheClient:
    @pytest.fixture
    def engine(self, answering):
        return EngineAdmin(answering.url)

    def test_a_claim_of_an_engine_that_another_training_owns_names_it_and_the_way_out(
        self, answering, engine
    ):
        answering.answers[PATH] = (409, json.dumps({"owner": ONE.run, "about": ONE.about}))
        owned = r"owns the engine at .*: 11111111 \(host one, /runs/one\).*--steal"
        with pytest.raises(EngineError, match=owned):
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
        end = Event()

        def answer(method, body):
            end.wait()
            return {}

        monkeypatch.setattr(admin, "_REGISTER_SECONDS", 0.01)
        answering.answers[PATH] = answer
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
