import json

import httpx
import pytest

from rolltap.trainer.viewer.app import POLICY, link, make_app
from rolltap.trainer.viewer.reader import RunReader
from tests.factories import add_rows, make_call, make_session, write_run

TOKEN = "a-token-of-the-tests"
URL = "http://127.0.0.1:8900"


@pytest.fixture
def reader(tmp_path):
    rows = [make_call(0), make_session(), make_call(1, session_id="a/b")]
    reader = RunReader(write_run(tmp_path / "run", *rows))
    yield reader
    reader.close()


@pytest.fixture
async def client(reader):
    """Yield a client without the token. `ours` has it."""
    transport = httpx.ASGITransport(make_app(reader, TOKEN, ["view.example"]))
    async with httpx.AsyncClient(transport=transport, base_url=URL) as client:
        yield client


@pytest.fixture
async def ours(client):
    client.headers["authorization"] = f"Bearer {TOKEN}"
    return client


async def test_the_link_sets_a_cookie_that_opens_everything(client):
    answer = await client.get(link("127.0.0.1", 8900, TOKEN))
    assert answer.status_code == 303
    assert answer.headers["location"] == "/"
    assert answer.headers["set-cookie"].endswith("HttpOnly; Path=/; SameSite=strict")
    page = await client.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert (await client.get("/api/run")).json()["run"]["name"] == "run"


@pytest.mark.parametrize(
    "path", ["/", "/page/app.js", "/api/run", "/api/follow", "/nothing", "/?token=wrong"]
)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": TOKEN},
        {"cookie": "rolltap_8900=x; =;"},
    ],
    ids=str,
)
async def test_nothing_is_answered_without_the_token(client, path, headers):
    answer = await client.get(path, headers=headers)
    assert answer.status_code == 401
    assert "open the link" in answer.json()["error"]


OTHERS = [
    "evil.example",
    "evil.example:8900",
    "127.0.0.1.evil.example",
    "",
    "[::1",
    "localhost@x.y",
]
OWN = ["localhost:1", "127.0.0.1", "[::1]:80", "View.example", "10.1.2.3:5"]


@pytest.mark.parametrize("host", [*OTHERS, *OWN])
async def test_addresses_and_names_of_the_machine_are_accepted_and_others_refused_with_the_token(
    ours, host
):
    answer = await ours.get("/api/run", headers={"host": host})
    assert answer.status_code == (200 if host in OWN else 403)


@pytest.mark.parametrize("path", ["/", "/api/run", "/page/none"])
async def test_every_response_has_the_headers_that_protect_the_page(ours, path):
    refused = await ours.get(path, headers={"authorization": ""})
    for headers in ((await ours.get(path)).headers, refused.headers):
        assert headers["content-security-policy"] == POLICY
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"


async def test_the_files_of_the_page_are_served_and_no_others(ours):
    index = await ours.get("/")
    for name in index.text.split('"'):
        if name.startswith("./page/"):
            file = await ours.get(name[1:])
            assert file.status_code == 200
            assert file.headers["content-type"].split(";")[0] in ("text/javascript", "text/css")
    climbing = ["../app.py", "%2e%2e/app.py", "..%2fapp.py", "/etc/passwd", "%2fetc%2fpasswd"]
    for path in (*climbing, "vendor", "", "app.js%00"):
        assert (await ours.get(f"/page/{path}")).status_code == 404, path
    for path in ("/docs", "/openapi.json", "/redoc"):
        assert (await ours.get(path)).status_code == 404, path


async def test_ids_are_taken_as_they_are_encoded(ours):
    assert (await ours.get("/api/sessions/a%2Fb")).json()["session_id"] == "a/b"
    assert (await ours.get("/api/sessions/a/b")).status_code == 404


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("nothing", 404, "there is no 'api/nothing'"),
        ("sessions/s/more", 404, "there is no 'api/sessions/s/more'"),
        ("sessions/none", 404, "the run has no session 'none'"),
        ("sessions/s/calls/none", 404, "the session has no call 'none'"),
        ("search", 422, "the query has no 'q'"),
        ("compare?a=s", 422, "the query has no 'b'"),
        ("run", 500, "is not a run folder"),
    ],
)
async def test_a_mistake_is_an_error_in_words(ours, reader, path, status, message):
    if path == "run":
        (reader.run / "run.json").unlink()
    answer = await ours.get(f"/api/{path}")
    assert answer.status_code == status
    assert message in answer.json()["error"]


def test_the_run_is_read_behind_the_answers_and_what_changed_is_told(tmp_path, serve):
    run = write_run(tmp_path / "run", make_call(0), make_session(), make_call(1, session_id="a/b"))
    opened = serve(run)
    with httpx.Client(follow_redirects=True, trust_env=False, timeout=120) as client:
        client.get(opened)
        page, _, _ = opened.partition("?")
        with client.stream("GET", f"{page}api/follow") as stream:
            lines = stream.iter_lines()
            told = next_told(lines)
            assert told["sessions"] == []
            while told["read"] != {"sessions": 2, "of": 2}:
                told = next_told(lines)
            add_rows(run, make_call(7, [1, 9]))
            while told["sessions"] != ["s"]:
                told = next_told(lines)
        for row in client.get(f"{page}api/sessions").json()["sessions"]:
            assert row["read"]


def next_told(lines):
    """Return the data of the next event."""
    for line in lines:
        if line.startswith("data: "):
            return json.loads(line.removeprefix("data: "))
