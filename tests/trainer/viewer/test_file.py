import base64
import gzip
import hashlib
import json
import re
from urllib.parse import unquote

import pytest

import rolltap
from rolltap.addons.errors import InputError
from rolltap.addons.store.records import json_text
from rolltap.trainer.runs.secrets import REDACTED
from rolltap.trainer.viewer.answers import answer
from rolltap.trainer.viewer.file import MOST_SESSIONS, page_html
from tests.factories import make_call, make_session, says, write_run
from tests.trainer.viewer.runs import reading, write

SECRET = "hf_" + "k3Jx9QvT2mWz7LpB4rYd8NfH6sCg1VaExYz"


def answers_in(text):
    """Return path -> JSON of the elements of a file."""
    found = re.findall(
        r'<script type="application/gzip\+base64" data-path="([^"]*)">([^<]*)</script>', text
    )
    return {
        path.replace("&amp;", "&"): json.loads(gzip.decompress(base64.b64decode(data)))
        for path, data in found
    }


def whole(answers, path):
    """Return a call with its parent's tokens, as the page puts them together."""
    found = json.loads(json.dumps(answers[path]))
    if prefix := found.pop("prefix", None):
        parent = whole(answers, prefix)
        found["call"]["prompt_ids"] = (
            parent["call"]["prompt_ids"]
            + parent["call"]["completion_ids"]
            + found["call"]["prompt_ids"]
        )
        if found["prompt_pieces"] is not None:
            found["prompt_pieces"] = (
                parent["prompt_pieces"] + parent["completion_pieces"] + found["prompt_pieces"]
            )
    return found


@pytest.fixture
def written(tmp_path, tokenizer, tokenizer_folder):
    return write(tmp_path / "run", tokenizer, tokenizer_folder)[0]


def test_a_file_has_every_answer_of_the_server(written, tmp_path):
    result = rolltap.open_run(written).view_file(tmp_path / "run.html", progress=False)
    text = (tmp_path / "run.html").read_text()
    assert (result.sessions, result.size, result.secrets) == (3, len(text.encode()), {})
    answers = answers_in(text)
    with reading(written) as reader:
        for path in answers:
            expected = json.loads(json_text(answer(reader, path)))
            if path == "api/run":
                expected["run"]["path"] = "run"
            if "/calls/" in path:
                expected["call"]["logprobs"] = [
                    round(value, 4) for value in expected["call"]["logprobs"]
                ]
            assert whole(answers, path) == expected, path
    assert {unquote(path) for path in answers} >= {
        "api/run",
        "api/sessions",
        "api/sessions/a/b c/calls/5",
    }
    assert "api/compare?a=other&b=s" in answers


def test_a_call_whose_prompt_is_its_parents_tokens_alone_has_them_once(tmp_path):
    first = make_call(0, [1, 2], [3, 4])
    folder = write_run(tmp_path / "run", first, make_call(1, [], [5], after=first), make_session())
    rolltap.open_run(folder).view_file(tmp_path / "run.html", progress=False)
    answers = answers_in((tmp_path / "run.html").read_text())
    assert whole(answers, "api/sessions/s/calls/1")["call"]["prompt_ids"] == [1, 2, 3, 4]


def test_a_file_opens_without_a_network_and_runs_nothing_but_the_page(written, tmp_path):
    rolltap.open_run(written).view_file(tmp_path / "run.html", progress=False)
    text = (tmp_path / "run.html").read_text()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert "default-src 'none'" in policy
    assert "connect-src" not in policy
    assert "unsafe" not in policy
    inline = re.findall(
        r'<script type="(?:importmap|module)">([^<]*)</script>|<style>(.*?)</style>',
        text,
        re.DOTALL,
    )
    for part in filter(None, (script or style for script, style in inline)):
        assert (
            f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'"
            in policy
        )
    assert not re.search(r'<(?:script|link|img)[^>]*(?:src|href)="(?!data:)', text)
    modules = json.loads(inline[-2][0] or inline[-1][0])["imports"] if inline else {}
    for url in modules.values():
        module = base64.b64decode(url.partition(",")[2]).decode()
        assert not re.search(r'(?:from|import)\s*"\./', module)
        assert {
            *re.findall(r'(?:^|[\s;}])(?:from|import)\s*"(page/[^"]*)"', module)
        } <= modules.keys()


def test_modules_and_styles_of_a_page_are_put_into_it():
    page = {
        "index.html": '<meta charset="utf-8"><link rel="stylesheet" href="./page/a.css">'
        '<script type="module" src="./page/app.js"></script><body></body>',
        "a.css": "p { color: red }",
        "app.js": 'import { x } from "./vendor/x.js";\nexport{y}from "./y.js";',
        "y.js": "export const y = 1;",
        "vendor/x.js": 'import"./z.js";',
        "vendor/z.js": "",
    }
    begin, end = page_html(page)
    assert end == "</body>"
    assert "<style>p { color: red }</style>" in begin
    (imports,) = re.findall(r'<script type="importmap">(.*)</script>', begin)
    modules = {
        n: base64.b64decode(u.partition(",")[2]).decode()
        for n, u in json.loads(imports)["imports"].items()
    }
    assert (
        modules["page/app.js"]
        == 'import { x } from "page/vendor/x.js";\nexport{y}from "page/y.js";'
    )
    assert modules["page/vendor/x.js"] == 'import"page/vendor/z.js";'


@pytest.fixture
def leaking(tmp_path, tokenizer, tokenizer_folder):
    """Return a run in which a secret begins in a prompt and ends in the reply, and another in
    texts."""

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    first = make_call(
        0,
        ids(f"the key is {SECRET[:20]}"),
        ids(f"{SECRET[20:]} indeed"),
        reply=says(f"it is {SECRET}"),
    )
    second = make_call(1, ids(" and on"), ids("done"), after=first)
    url = "postgres://me:hunter2@db.example/x"
    return write_run(
        tmp_path / "run",
        first,
        second,
        make_session(error=url),
        make_call(0, ids("acme's plan"), ids("sure"), session_id="clean"),
        make_session("clean", evidence={"note": "for acme only"}),
        model=str(tokenizer_folder),
    )


def test_secrets_are_redacted_in_texts_and_tokens_before_anything_is_written(
    leaking, tmp_path, tokenizer
):
    run = rolltap.open_run(leaking)
    result = run.view_file(tmp_path / "run.html", redact=["acme"], progress=False)
    assert result.secrets == {
        "token (hf_...)": {"s"},
        "Password in a URL": {"s"},
        "given text": {"clean"},
    }
    assert any("token (hf_...), in 1 session (s)" in line for line in result.lines())
    answers = answers_in((tmp_path / "run.html").read_text())
    written = json.dumps(answers, ensure_ascii=False)
    for secret in (SECRET, SECRET[:20], SECRET[20:], "hunter2", "acme"):
        assert secret not in written
    call = whole(answers, "api/sessions/s/calls/1")
    text = "".join(piece[0] for piece in call["prompt_pieces"])
    assert text.replace(REDACTED, "") == "the key is indeed and on"
    known = [token for token in call["call"]["prompt_ids"] if token is not None]
    assert tokenizer.decode(known) == "the key is indeed and on"
    assert sum(piece[1] for piece in call["prompt_pieces"]) == len(call["call"]["prompt_ids"])
    assert len(call["call"]["prompt_ids"]) > len(known)


def test_without_a_tokenizer_all_tokens_of_a_session_with_a_secret_are_hidden(tmp_path):
    folder = write_run(
        tmp_path / "run",
        make_call(0, [1, 2], [3], reply=says(SECRET)),
        make_session(),
        model="/nowhere",
    )
    rolltap.open_run(folder).view_file(tmp_path / "run.html", progress=False)
    call = answers_in((tmp_path / "run.html").read_text())["api/sessions/s/calls/0"]
    assert (call["call"]["prompt_ids"], call["call"]["completion_ids"]) == ([None, None], [None])


def test_sessions_are_chosen_by_prefixes_of_their_ids(written, tmp_path):
    run = rolltap.open_run(written)
    assert run.view_file(tmp_path / "one.html", sessions=["oth"], progress=False).sessions == 1
    rows = answers_in((tmp_path / "one.html").read_text())["api/sessions"]["sessions"]
    assert [row["session_id"] for row in rows] == ["other"]
    with pytest.raises(InputError, match="has no session 'none'"):
        run.view_file(tmp_path / "two.html", sessions=["none"], progress=False)
    assert not (tmp_path / "two.html").exists()


def test_a_large_run_asks_which_sessions(tmp_path):
    calls = [make_call(0, session_id=f"s{number}") for number in range(MOST_SESSIONS + 1)]
    run = rolltap.open_run(write_run(tmp_path / "run", *calls))
    with pytest.raises(
        InputError, match=r"has 51 sessions: choose those of the file with --sessions"
    ):
        run.view_file(tmp_path / "run.html", progress=False)


def test_ids_that_redaction_makes_equal_are_refused(tmp_path):
    folder = write_run(
        tmp_path / "run", *(make_call(0, session_id=name) for name in ("acme-x", "[redacted]-x"))
    )
    with pytest.raises(InputError, match="once redacted"):
        rolltap.open_run(folder).view_file(tmp_path / "run.html", redact=["acme"], progress=False)
