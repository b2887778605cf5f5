"""Attacks on the rollout service by HTTP: none starves it, stops other sessions, or runs code with
a page's cookie."""

import asyncio
import contextlib
import os
import resource
import threading
from collections import Counter
from types import SimpleNamespace

import httpx
import pytest
import uvicorn

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.sandbox import SandboxRuntime
from rolltap.trainer.descriptors import raise_limit, share_limit, too_many_files
from rolltap.trainer.service import app as service_app
from rolltap.trainer.service import connections
from rolltap.trainer.service.app import make_app
from rolltap.trainer.service.connections import Connection
from rolltap.trainer.service.groups import Groups
from rolltap.trainer.service.recording import Health
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.viewer.app import reading_token
from tests.addons.harness import until

TOKEN = "t" * 32
BEARER = {"authorization": f"Bearer {TOKEN}"}
MOST = 10


@pytest.fixture
async def groups(tmp_path):
    recorder = SimpleNamespace(path=tmp_path, engine="http://127.0.0.1:9")
    worker = SimpleNamespace(recorder=recorder, runtime=SandboxRuntime(), harness=None)
    task = Task(id="words", instruction="go", evaluate=["true"])
    groups = Groups(worker, [task], most=10_000, share=0.5)
    await groups.load()
    yield groups
    groups.journal.close()


@pytest.fixture
async def address(groups):
    """The address of a service in this process, without a recorder."""
    config = uvicorn.Config(
        make_app(groups, TOKEN),
        port=0,
        http=Connection,
        ws="none",
        lifespan="off",
        limit_concurrency=MOST,
    )
    config.timeout_graceful_shutdown = 1
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    yield server.servers[0].sockets[0].getsockname()
    await server.shutdown()


@pytest.fixture
async def client(address):
    host, port = address
    async with httpx.AsyncClient(
        base_url=f"http://{host}:{port}", headers=BEARER, trust_env=False
    ) as client:
        yield client


SHELL = '{"kind": "command", "command": ["true"]}'
HEAVY = f'{{"kind": "several", "judges": [{{"name": "a", "weight": Infinity, "judge": {SHELL}}}]}}'
NESTED = '{"x":' * 200 + "0" + "}" * 200
CANNOT_RUN = r"""
memory that no machine has: {"limits": {"memory_gib": 1e308}}
a disk without end: {"limits": {"disk_gib": Infinity}}
processors that are no number: {"limits": {"cpus": NaN}}
a weight without end: {"evaluate": [], "judge": <heavy>}
a time limit without end: {"timeout": Infinity}
an integer of many bytes: {"limits": {"processes": <many bytes>}}
ids that make no file name: {"task": "words", "id": "<200>", "sessions": ["<200>"]}
a NUL in the instruction: {"instruction": "go\u0000"}
a NUL in the judge's command: {"evaluate": ["true", "\u0000"]}
a NUL in a variable: {"env": {"A": "\u0000"}}
a variable's name with an equals sign: {"env": {"A=B": "c"}}
a variable's name that is an option: {"env": {"--env": "c"}}
an argument of 200,000 characters: {"evaluate": ["true", "<200,000>"]}
an instruction of 200,000 characters: {"instruction": "<200,000>"}
variables of 2 MB: {"env": {<variables>}}
a session that is named like a retry: {"task": "words", "sessions": ["0~1"]}
a session whose name has a dash: {"task": "words", "id": "p", "sessions": ["0-0"]}
half of a surrogate pair: {"instruction": "\ud800"}
half of a surrogate pair in the id of a task: {"task": "\ud800"}
half of a surrogate pair in an unknown key: {"task": "words", "\ud800": 1}
half of a surrogate pair in a source: {"source": "\udfff"}
a task of 200 levels: {"judge": <nested>}
a sampling that is no number: {"task": "words", "sampling": {"temperature": NaN}}
""".strip().splitlines()
"""Bodies, and fields of a task of one's own."""
LARGE = {
    "heavy": HEAVY,
    "many bytes": str(1 << 400),
    "200": "a" * 199,
    "200,000": "x" * 200_000,
    "variables": ",".join(f'"A{n}": "{"x" * 100_000}"' for n in range(20)),
    "nested": NESTED,
}
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("case", CANNOT_RUN)
async def test_what_can_never_run_is_refused_and_nothing_is_accepted(client, groups, case):
    body = case.partition(": ")[2]
    for name, text in LARGE.items():
        body = body.replace(f"<{name}>", text)
    if not body.startswith('{"task"'):
        body = f'{{"task": {{"id": "own", "instruction": "go", "evaluate": ["true"], {body[1:]}}}'
    answer = await client.post("/groups", content=body, headers=JSON)
    assert answer.status_code == 422
    assert answer.json()["error"]
    assert len(groups.journal) == 0


@pytest.mark.parametrize(
    "body",
    [
        b'{"task": "\xff"}',
        b'{"task": ' + b"[" * 1_000_000,
        b'{"sessions": ' + b"9" * 10_000 + b"}",
    ],
    ids=["no UTF-8", "nested", "a long number"],
)
async def test_what_is_no_utf8_or_nested_without_end_is_refused(client, body):
    answer = await client.post("/groups", content=body, headers=JSON)
    assert answer.status_code in (400, 422)
    assert answer.json()["error"]


async def test_no_two_groups_have_a_session_of_the_same_id(client):
    ids = []
    for name, session in (("p", "0"), ("p-0", "0"), ("p-0-0", "0"), ("p", "0-0"), ("p-0", "0-0")):
        body = {"task": "words", "id": name, "sessions": [session]}
        answer = await client.post("/groups", json=body)
        ids += answer.json().get("session_ids", [])
    assert len(ids) == len({*ids}) == 3


class Raw:
    """A connection without a library, that sends what no library does."""

    def __init__(self, reader, writer):
        self.reader = reader
        self.writer = writer

    async def send(self, data):
        with contextlib.suppress(ConnectionError):
            self.writer.write(data)
            await self.writer.drain()

    async def rest(self):
        """Return what came until the connection was closed."""
        try:
            return await self.reader.read()
        except ConnectionError:
            return b""


@pytest.fixture
async def connect(address):
    """Open a connection of `Raw`, which is closed at the end."""
    opened = []

    async def connect():
        opened.append(Raw(*await asyncio.open_connection(*address)))
        return opened[-1]

    yield connect
    for raw in opened:
        raw.writer.close()


POST = (
    b"POST /groups HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length:"
    b" 4000000\r\n"
)


@pytest.mark.parametrize(
    ("path", "status"),
    [("/groups", 401), ("/nowhere", 401), ("/view/", 401), ("/health", 405), ("/docs", 405)],
)
async def test_a_body_without_the_token_is_not_read(connect, path, status):
    raw = await connect()
    await raw.send(POST.replace(b"/groups", path.encode()) + b"\r\n")  # and nothing of the body
    assert await raw.reader.readexactly(12) == b"HTTP/1.1 %d" % status
    assert (b"connection: close" in await raw.reader.readuntil(b"\r\n\r\n")) == (
        path in ("/groups", "/nowhere")
    )


async def test_a_body_that_never_ends_is_given_up(connect, monkeypatch):
    monkeypatch.setattr(service_app, "BODY_SECONDS", 0.2)
    raw = await connect()
    await raw.send(POST + b"authorization: Bearer " + TOKEN.encode() + b"\r\n\r\n{")
    answer = await raw.rest()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"was not complete after 0.2 s" in answer


@pytest.mark.parametrize(
    "sent", [b"", b"GET /health HTTP/1.1\r\nx: ", b"GET /docs HTTP/1.1\r\nhost: x\r\n\r\nGET"]
)
async def test_a_connection_that_asks_for_nothing_is_closed(connect, monkeypatch, sent):
    monkeypatch.setattr(connections, "HEADERS_SECONDS", 0.2)
    raw = await connect()
    await raw.send(sent)
    answer = await raw.rest()
    assert answer.startswith(b"HTTP/1.1 200 ") == sent.startswith(b"GET /docs")


async def test_idle_connections_make_room_for_others(connect, client):
    idle = [await connect() for _ in range(5 * MOST)]
    assert (await client.get("/policy")).status_code == 200
    assert await idle[0].rest() == b""  # the oldest was closed


async def test_few_connections_wait_however_many_may_be_open(connect, client, monkeypatch):
    monkeypatch.setattr(connections, "MOST_WAITING", 3)
    idle = [await connect() for _ in range(MOST - 2)]
    assert (await client.get("/policy")).status_code == 200
    assert [await raw.rest() for raw in idle[:4]] == [b""] * 4
    assert len(Connection.waiting) <= 3


async def test_streams_of_events_stay_when_others_come(connect, client):
    async with client.stream("GET", "/events") as stream:
        idle = [await connect() for _ in range(2 * MOST)]
        answer = await client.post("/groups", json={"task": "words", "id": "a", "sessions": 1})
        assert answer.status_code == 201
        async for line in stream.aiter_lines():
            if line == "event: accepted":
                break
        assert await idle[0].rest() == b""


async def test_many_who_ask_for_the_health_ask_the_engines_once(groups, client, monkeypatch):
    asked = []
    answer = threading.Event()
    waiting = Counter()
    shield = asyncio.shield

    def ask_the_engines():
        asked.append(1)
        answer.wait()
        return Health(["none"])

    def wait_for(task):
        waiting[task] += 1
        return shield(task)

    def all_wait():
        return 5 in waiting.values()

    groups.recorded.health = ask_the_engines
    monkeypatch.setattr(asyncio, "shield", wait_for)
    asking = [asyncio.create_task(client.get("/health")) for _ in range(5)]
    await until(all_wait)
    answer.set()
    assert {each.status_code for each in await asyncio.gather(*asking)} == {503}
    assert len(asked) == 1


@pytest.fixture
def may_open(monkeypatch):
    """Return a function that sets how many files this process may open, and at most."""

    def may_open(soft, hard):
        monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))

    return may_open


async def test_without_descriptors_it_says_so_and_blames_no_engine(groups, may_open):
    may_open(len(os.listdir("/proc/self/fd")), 1 << 20)
    health = groups.recorded.health()
    assert health.problems[0].startswith("too many open files: ")
    assert not any("does not answer" in problem for problem in health.problems + health.warnings)


def test_the_limit_of_descriptors_is_raised_and_shared(may_open, monkeypatch):
    given = []
    may_open(64, 4096)
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: given.append(limits))
    assert raise_limit() == 4096
    assert given == [(4096, 4096)]
    assert [share_limit(files, 8) for files in (1 << 20, 512, 256)] == [16_384, 112, 8]
    may_open(64, 64)
    with pytest.raises(InputError, match="too few files may be open: 64, and a recorder needs 256"):
        raise_limit()
    may_open(4096, 4096)
    assert too_many_files() is None


async def test_the_cookie_of_the_page_reads_and_runs_nothing(client):
    async with httpx.AsyncClient(base_url=client.base_url, trust_env=False) as browser:
        answer = await browser.get(f"/view/?token={TOKEN}")
        assert TOKEN not in answer.headers["set-cookie"]
        (cookie,) = browser.cookies.values()
        assert cookie == reading_token(TOKEN)
        assert (await browser.get("/view/")).status_code == 200
        for token in (cookie, cookie[:-1]):
            bearer = {"authorization": f"Bearer {token}"}
            posted = await browser.post("/groups", json={"task": "words"}, headers=bearer)
            assert posted.status_code == 401
            assert (await browser.get("/policy", headers=bearer)).status_code == 401
        assert (await browser.get(f"/view/?token={cookie}")).status_code == 303


async def test_the_page_of_the_routes_loads_nothing_from_elsewhere(client):
    answer = await client.get("/docs", headers={"authorization": ""})
    assert answer.status_code == 200
    assert "/groups/{name}/traces" in answer.text
    assert not {"http:", "https:", "<script", "src="} & {*answer.text.replace("=", "= ").split()}
    assert "//" not in answer.text
    assert answer.headers["content-security-policy"] == "default-src 'none'"
    assert (await client.get("/redoc")).status_code == 404
