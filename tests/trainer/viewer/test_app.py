import json

import httpx
import pytest

from rolltap.trainer.viewer.app import POLICY, _changes, link, make_app
from rolltap.trainer.viewer.reader import RunReader
from tests.factories import add_rows, make_call, make_session, write_run
from tests.trainer.viewer.runs import read_all

TOKEN = "a-token-of-the-tests"


@pytest.fixture
def reader(tmp_path):
    reader = RunReader(
        write_run(tmp_path / "run", make_call(0), make_session(), make_call(1, session_id="a/b"))
    )
    yield reader
    reader.close()


@pytest.fixture
async def client(reader):
    app = make_app(reader, TOKEN, ["view.example"])
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8900"
    ) as client:
        yield client


BEARER = {"authorization": f"Bearer {TOKEN}"}


async def test_the_link_sets_a_cookie_that_opens_everything(client):
    answer = await client.get(link("127.0.0.1", 8900, TOKEN))
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert answer.headers["set-cookie"].endswith("HttpOnly; Path=/; SameSite=strict")
    page = await client.get("/")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert (await client.get("/api/run")).json()["run"]["name"] == "run"


@pytest.mark.parametrize(
    "path", ["/", "/page/app.js", "/api/run", "/api/follow", "/nothing", "/?token=wrong"]
)
async def test_nothing_is_answered_without_the_token(client, path):
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": TOKEN},
        {"cookie": "rolltap_8900=x; =;"},
    ):
        answer = await client.get(path, headers=headers)
        assert answer.status_code == 401
        assert "open the link" in answer.json()["error"]


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8900", "127.0.0.1.evil.example", "", "[::1", "localhost@x.y"],
)
async def test_another_host_name_is_refused_whoever_has_the_token(client, host):
    assert (await client.get("/api/run", headers={**BEARER, "host": host})).status_code == 403


@pytest.mark.parametrize(
    "host", ["localhost:1", "127.0.0.1", "[::1]:80", "View.example", "10.1.2.3:5"]
)
async def test_addresses_and_names_of_the_machine_are_accepted(client, host):
    assert (await client.get("/api/run", headers={**BEARER, "host": host})).status_code == 200


async def test_every_response_has_the_headers_that_protect_the_page(client):
    for path, headers in (("/", BEARER), ("/api/run", BEARER), ("/page/none", BEARER), ("/", {})):
        found = (await client.get(path, headers=headers)).headers
        assert found["content-security-policy"] == POLICY
        assert (found["x-content-type-options"], found["referrer-policy"]) == (
            "nosniff",
            "no-referrer",
        )
        assert found["cache-control"] == "no-store"


async def test_the_files_of_the_page_are_served_and_no_others(client):
    index = await client.get("/", headers=BEARER)
    for name in index.text.split('"'):
        if name.startswith("./page/"):
            file = await client.get(name[1:], headers=BEARER)
            assert file.status_code == 200
            assert file.headers["content-type"].split(";")[0] in ("text/javascript", "text/css")
    for path in (
        "../app.py",
        "%2e%2e/app.py",
        "..%2fapp.py",
        "/etc/passwd",
        "%2fetc%2fpasswd",
        "vendor",
        "",
        "app.js%00",
    ):
        answer = await client.get(f"/page/{path}", headers=BEARER)
        assert answer.status_code == 404, path
    for path in ("/docs", "/openapi.json", "/redoc"):
        assert (await client.get(path, headers=BEARER)).status_code == 404


async def test_ids_are_taken_as_they_are_encoded(client):
    assert (await client.get("/api/sessions/a%2Fb", headers=BEARER)).json()["session_id"] == "a/b"
    answer = await client.get("/api/sessions/a/b", headers=BEARER)
    assert (answer.status_code, answer.headers["content-type"]) == (404, "application/json")


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/api/nothing", 404, "there is no 'api/nothing'"),
        ("/api/sessions/none", 404, "the run has no session 'none'"),
        ("/api/sessions/s/calls/none", 404, "the session has no call 'none'"),
        ("/api/search", 422, "the query has no 'q'"),
        ("/api/compare?a=s", 422, "the query has no 'b'"),
    ],
)
async def test_a_mistake_is_an_error_in_words(client, path, status, message):
    answer = await client.get(path, headers=BEARER)
    assert (answer.status_code, message in answer.json()["error"]) == (status, True)


async def test_a_folder_that_is_no_run_any_more_is_an_error_in_words(client, reader):
    (reader.run / "run.json").unlink()
    answer = await client.get("/api/run", headers=BEARER)
    assert (answer.status_code, "is not a run folder" in answer.json()["error"]) == (500, True)


async def test_what_changed_is_told_as_it_is_read(reader):
    read_all(reader)
    stream = _changes(reader)
    assert '"sessions": []' in await anext(stream)
    add_rows(reader.run, make_call(7, [1, 9]))
    read_all(reader)
    event, data, *_ = (await anext(stream)).split("\n")
    assert event == "event: changed"
    assert json.loads(data.removeprefix("data: ")) == {
        "sessions": ["s"],
        "read": {"sessions": 2, "of": 2},
    }
    await stream.aclose()


async def test_a_reader_reads_behind_the_answers(client, reader):
    await client.get("/api/run", headers=BEARER)
    stream = _changes(reader)
    read = {}
    while read != {"sessions": 2, "of": 2}:
        read = json.loads((await anext(stream)).partition("data: ")[2])["read"]
    await stream.aclose()
    assert [
        row["read"]
        for row in (await client.get("/api/sessions", headers=BEARER)).json()["sessions"]
    ] == [
        True,
        True,
    ]
