import base64
import gzip
import hashlib
import json
import re
from html import unescape
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


def view(run, folder, **how):
    """Write the file of a run. Return the result, the file's text and its answers by their paths."""
    out = folder / "run.html"
    result = rolltap.open_run(run).view_file(out, progress=False, **how)
    text = out.read_text()
    element = r'<script type="application/gzip\+base64" data-path="([^"]*)">([^<]*)</script>'
    answers = {}
    for path, data in re.findall(element, text):
        answers[unescape(path)] = json.loads(gzip.decompress(base64.b64decode(data)))
    return result, text, answers


def whole(answers, path):
    """Return a call with its parent's tokens, as the page puts them together."""
    found = json.loads(json.dumps(answers[path]))
    if prefix := found.pop("prefix", None):
        before = whole(answers, prefix)
        call = before["call"]
        found["call"]["prompt_ids"][:0] = call["prompt_ids"] + call["completion_ids"]
        if found["prompt_pieces"] is not None:
            found["prompt_pieces"][:0] = before["prompt_pieces"] + before["completion_pieces"]
    return found


def code_of(data_url):
    return base64.b64decode(data_url.partition(",")[2]).decode()


@pytest.fixture
def written(tmp_path, tokenizer, tokenizer_folder):
    return write(tmp_path / "run", tokenizer, tokenizer_folder)[0]


def test_a_file_has_every_answer_of_the_server(written, tmp_path):
    result, text, answers = view(written, tmp_path)
    assert result.sessions == 3
    assert result.size == len(text.encode())
    assert result.secrets == {}
    with reading(written) as reader:
        for path in answers:
            expected = json.loads(json_text(answer(reader, path)))
            if path == "api/run":
                expected["run"]["path"] = "run"
            if "/calls/" in path:
                logprobs = expected["call"]["logprobs"]
                expected["call"]["logprobs"] = [round(value, 4) for value in logprobs]
            assert whole(answers, path) == expected, path
    calls = "api/sessions/a/b c/calls/5"
    assert {unquote(path) for path in answers} >= {"api/run", "api/sessions", calls}
    assert "api/compare?a=other&b=s" in answers


def test_a_call_whose_prompt_is_its_parents_tokens_alone_has_them_once(tmp_path):
    first = make_call(0, [1, 2], [3, 4])
    run = write_run(tmp_path / "run", first, make_call(1, [], [5], after=first), make_session())
    _, _, answers = view(run, tmp_path)
    assert whole(answers, "api/sessions/s/calls/1")["call"]["prompt_ids"] == [1, 2, 3, 4]


def test_a_file_opens_without_a_network_and_runs_nothing_but_the_page(written, tmp_path):
    _, text, _ = view(written, tmp_path)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert "default-src 'none'" in policy
    assert "connect-src" not in policy
    assert "unsafe" not in policy
    (imports,) = re.findall(r'<script type="importmap">([^<]*)</script>', text)
    scripts = re.findall(r'<script type="module">([^<]*)</script>', text)
    styles = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    for part in (imports, *scripts, *styles):
        digest = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert not re.search(r'<(?:script|link|img)[^>]*(?:src|href)="(?!data:)', text)
    modules = json.loads(imports)["imports"]
    assert modules
    for url in modules.values():
        code = code_of(url)
        assert not re.search(r'(?:from|import)\s*"\./', code)
        imported = re.findall(r'(?:^|[\s;}])(?:from|import)\s*"(page/[^"]*)"', code)
        assert set(imported) <= modules.keys()


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
    modules = json.loads(imports)["imports"]
    app = 'import { x } from "page/vendor/x.js";\nexport{y}from "page/y.js";'
    assert code_of(modules["page/app.js"]) == app
    assert code_of(modules["page/vendor/x.js"]) == 'import"page/vendor/z.js";'


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
    return write_run(
        tmp_path / "run",
        first,
        make_call(1, ids(" and on"), ids("done"), after=first),
        make_session(error="postgres://me:hunter2@db.example/x"),
        make_call(0, ids("acme's plan"), ids("sure"), session_id="clean"),
        make_session("clean", evidence={"note": "for acme only"}),
        model=str(tokenizer_folder),
    )


def test_secrets_are_redacted_in_texts_and_tokens_before_anything_is_written(
    leaking, tmp_path, tokenizer
):
    result, _, answers = view(leaking, tmp_path, redact=["acme"])
    assert result.secrets == {
        "token (hf_...)": {"s"},
        "Password in a URL": {"s"},
        "given text": {"clean"},
    }
    assert any("token (hf_...), in 1 session (s)" in line for line in result.lines())
    written = json.dumps(answers, ensure_ascii=False)
    for secret in (SECRET, SECRET[:20], SECRET[20:], "hunter2", "acme"):
        assert secret not in written
    call = whole(answers, "api/sessions/s/calls/1")
    ids = call["call"]["prompt_ids"]
    text = "".join(piece[0] for piece in call["prompt_pieces"])
    assert text.replace(REDACTED, "") == "the key is indeed and on"
    known = [token for token in ids if token is not None]
    assert tokenizer.decode(known) == "the key is indeed and on"
    assert sum(piece[1] for piece in call["prompt_pieces"]) == len(ids) > len(known)


def test_without_a_tokenizer_all_tokens_of_a_session_with_a_secret_are_hidden(tmp_path):
    call = make_call(0, [1, 2], [3], reply=says(SECRET))
    run = write_run(tmp_path / "run", call, make_session(), model="/nowhere")
    _, _, answers = view(run, tmp_path)
    found = answers["api/sessions/s/calls/0"]["call"]
    assert found["prompt_ids"] == [None, None]
    assert found["completion_ids"] == [None]


def test_sessions_are_chosen_by_prefixes_of_their_ids(written, tmp_path):
    result, _, answers = view(written, tmp_path, sessions=["oth"])
    assert result.sessions == 1
    (row,) = answers["api/sessions"]["sessions"]
    assert row["session_id"] == "other"


def test_an_unknown_session_a_large_run_and_ids_that_redaction_makes_equal_are_refused(tmp_path):
    few = [make_call(0, session_id=name) for name in ("acme-x", "[redacted]-x")]
    many = [make_call(0, session_id=f"s{number}") for number in range(MOST_SESSIONS + 1)]
    few = write_run(tmp_path / "few", *few)
    many = write_run(tmp_path / "many", *many)
    for run, how, message in [
        (few, {"sessions": ["none"]}, "has no session 'none'"),
        (few, {"redact": ["acme"]}, "once redacted"),
        (many, {}, "has 51 sessions: choose those of the file with --sessions"),
    ]:
        with pytest.raises(InputError, match=message):
            view(run, tmp_path, **how)
        assert not (tmp_path / "run.html").exists()
