"""Sessions and judges have hosts of their own: a program tries to reach those of another phase or
session."""

import base64

import pytest

from rolltap.addons.secret import password
from rolltap.addons.store.session_options import SessionOptions
from rolltap.trainer.boxes.environment import SESSION_END
from tests.security.raw import (
    ask,
    call,
    credentials,
    listening,
    plain,
    read,
    read_head,
    recording,
    request,
)

SECRET = "the-secret-of-the-tests"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
AGENT = "g-0"
JUDGE = "g-0/judge"
OTHER = "g-1"


@pytest.fixture(scope="module")
def hosts():
    """Yield a server for each of the addresses of this machine that the tests use."""
    with (
        listening("127.0.0.3", answer=OK) as operators,
        listening("127.0.0.4", answer=OK) as agents,
        listening("127.0.0.5", answer=OK) as judges,
    ):
        yield {"operator": operators, "agent": agents, "judge": judges}


@pytest.fixture(scope="module")
def recorder(tmp_path_factory, tokenizer, tokenizer_folder, hosts):
    """Yield a recorder with a secret, and the options of an agent and of the judge of what it
    left."""
    folder = tmp_path_factory.mktemp("recorder")
    secret = folder / "secret"
    secret.touch(0o600)
    secret.write_text(SECRET)
    options = [f"rolltap_allow={hosts['operator'].name}", f"rolltap_secret_file={secret}"]
    with recording(folder, tokenizer, tokenizer_folder, *options) as recorder:
        SessionOptions(allow=(hosts["agent"].name,)).write(recorder.run, AGENT)
        SessionOptions(allow=(hosts["judge"].name,), model_calls=False).write(recorder.run, JUDGE)
        yield recorder


def proof(user, key=None):
    """Return the credentials of a session, or those with a key of another."""
    return credentials(user, key or password(SECRET, user))


def reached(recorder, hosts, user, more=b"", key=None):
    """Return the names of the servers that a session reaches. Each other one is refused, and sees
    no connection."""
    names = set()
    for name, server in hosts.items():
        before = len(server.connections)
        sent = request(f"http://{server.name}/", more=more + proof(user, key))
        answer = int(ask(recorder, sent).split()[1])
        assert answer in (200, 404, 407)
        assert len(server.connections) - before == (answer == 200)
        if answer == 200:
            names.add(name)
    return names


def events(recorder, user, kind):
    rows = recorder.rows("events")
    return [row for row in rows if (row["session_id"], row["kind"]) == (user, kind)]


def test_each_phase_reaches_its_own_hosts_and_a_session_without_a_list_those_of_the_operator(
    recorder, hosts
):
    for user, name in ((AGENT, "agent"), (JUDGE, "judge"), (OTHER, "operator")):
        before = len(events(recorder, user, "refused"))
        assert reached(recorder, hosts, user) == {name}
        assert len(events(recorder, user, "refused")) == before + 2


@pytest.mark.parametrize("user", [JUDGE, OTHER, f"{AGENT}%2Fjudge", f"{AGENT}/Judge", f" {JUDGE}"])
def test_the_password_of_a_session_is_that_of_no_other_and_of_no_judge(recorder, hosts, user):
    assert reached(recorder, hosts, user, key=password(SECRET, AGENT)) == set()


@pytest.mark.parametrize(
    "header",
    [
        "X-Rolltap-Session: g-0/judge",
        "X-Rolltap-Secret: x",
        "X-Forwarded-Host: 127.0.0.4",
        "Forwarded: host=127.0.0.4",
        "Rolltap-Allow: *",
        f"Proxy-Authorization: Basic {base64.b64encode(b'g-0/judge:x').decode()}",
        f"Authorization: Basic {base64.b64encode(b'g-0/judge:x').decode()}",
    ],
)
def test_no_header_gives_a_session_the_hosts_of_another_phase(recorder, hosts, header):
    more = header.encode() + b"\r\n"
    assert reached(recorder, hosts, AGENT, more=more) <= {"agent"}
    assert reached(recorder, hosts, JUDGE, more=more) <= {"judge"}


def test_a_tunnel_of_one_phase_takes_no_credentials_of_another(recorder, hosts):
    """A tunnel is opened for any host, and each request in it is decided by the tunnel's
    session."""
    host = hosts["judge"].name
    before = len(hosts["judge"].connections)
    with plain(recorder) as connection:
        connection.sendall(f"CONNECT {host} HTTP/1.1\r\n".encode() + proof(AGENT) + b"\r\n")
        assert read_head(connection).startswith(b"HTTP/1.1 200")
        connection.sendall(request("/", host=host, more=proof(JUDGE)))
        assert read_head(connection).startswith(b"HTTP/1.1 404")
    assert len(hosts["judge"].connections) == before


def test_the_policy_answers_no_call_of_a_judge(recorder):
    """Its calls would be tokens of nobody's session."""
    for user, answer in ((JUDGE, b"HTTP/1.1 404"), (OTHER, b"HTTP/1.1 200")):
        sent = call(user=user).replace(credentials(user), proof(user))
        assert ask(recorder, sent).startswith(answer)
    assert JUDGE not in {row["session_id"] for row in recorder.rows("calls")}


def test_what_has_ended_reaches_nothing_by_any_of_its_credentials(recorder, hosts):
    """An agent can leave its credentials in its files, for its code that runs in the judge's
    box."""
    SessionOptions(allow=(hosts["agent"].name,)).write(recorder.run, "ended")
    judges = SessionOptions(allow=(hosts["judge"].name,), model_calls=False)
    judges.write(recorder.run, "ended/judge")
    for user, name in (("ended", "agent"), ("ended/judge", "judge")):
        assert reached(recorder, hosts, user) == {name}
        more = b"Content-Length: 0\r\n" + proof(user)
        end = request(SESSION_END, host="session.rolltap", more=more).replace(b"GET", b"POST")
        assert ask(recorder, end, read).startswith(b"HTTP/1.1 200")
        assert reached(recorder, hosts, user) == set()


def test_a_session_cannot_change_its_hosts_later(recorder, hosts):
    """They are read once. A program of the runtime `process` could write the file."""
    SessionOptions(allow=(hosts["agent"].name,)).write(recorder.run, "later")
    assert reached(recorder, hosts, "later") == {"agent"}
    SessionOptions(allow=("*:*", hosts["judge"].name)).write(recorder.run, "later")
    assert reached(recorder, hosts, "later") == {"agent"}
