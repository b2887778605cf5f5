"""`rolltap view --out`: the page and some sessions of a run as one HTML file, which opens without a
network.

Its answers are elements, gzip as base64, one for each path that the page asks for. Secrets are
redacted, also in the tokens: the parts of a call's tokens whose text is one lose their ids.
"""

import base64
import gzip
import hashlib
import json
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import accumulate, combinations, product
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from rolltap.addons.errors import InputError
from rolltap.addons.store.records import json_text
from rolltap.addons.store.staging import new_file
from rolltap.trainer.console import Advance
from rolltap.trainer.names import counted, some
from rolltap.trainer.runs.secrets import REDACTED, Secrets
from rolltap.trainer.runs.views.inspect import find_id
from rolltap.trainer.runs.views.text import Piece
from rolltap.trainer.traces.reader import recorded_ids
from rolltap.trainer.traces.tree import path_to
from rolltap.trainer.viewer.answers import answer, page_files
from rolltap.trainer.viewer.data import JSON, call_json, compare_json
from rolltap.trainer.viewer.reader import Found, RunReader

MOST_SESSIONS = 50
"""Sessions of a file for which nothing has to be chosen."""
MOST_COMPARED = 16
"""Sessions of a group that can be compared in pairs."""
_PARTS = ("prompt", "completion")
_IMPORT = re.compile(r'((?:^|[\s;}])(?:from|import)\s*)"\./([\w./-]+)"')
_STYLE = re.compile(r'<link rel="stylesheet" href="\./page/([\w./-]+)">')
_SCRIPT = '<script type="module" src="./page/app.js"></script>'


@dataclass(slots=True)
class WrittenFile:
    """Contents of a file: number of sessions, size in bytes, and kind of secret -> the sessions
    that had one."""

    sessions: int = 0
    size: int = 0
    secrets: dict[str, set[str]] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """Yield what to say about it."""
        yield f"{counted(self.sessions, 'session')}, {self.size:,} bytes"
        for kind, sessions in sorted(self.secrets.items()):
            yield (
                f"redacted: {kind}, in {counted(len(sessions), 'session')}"
                f" ({some(sorted(sessions))}). Look at the file before you give it away: secrets of"
                " other forms are not found (--redact TEXT)"
            )


def write_file(
    run: Path,
    out: Path,
    sessions: Collection[str] | None,
    redact: Collection[str],
    advance: Advance,
) -> WrittenFile:
    """Write the page with some sessions of a run to the file `out`. Memory is that of a group's
    sessions.

    Raises `InputError` for a session that is not in the run, and without `sessions` for a run of
    more than `MOST_SESSIONS`; `RunError` and `OSError`.
    """
    known = recorded_ids(run)
    if sessions is None and len(known) > MOST_SESSIONS:
        raise InputError(
            f"{run} has {len(known)} sessions: choose those of the file with --sessions ID,..."
        )
    chosen = (
        known
        if sessions is None
        else {find_id(each, known, "session", str(run)) for each in sessions}
    )
    reader, secrets = RunReader(run, None if sessions is None else chosen), Secrets(redact)
    written = WrittenFile(len(chosen))
    try:
        while reader.step():
            advance("sessions read", reader.overview().progress["sessions"], len(chosen))
        begin, end = page_html(
            {name: file.read_text(encoding="utf-8") for name, file in page_files().items()}
        )
        paths = set[str]()
        with new_file(out, "w") as file:
            file.write(begin)
            for path, value in _answers(reader, secrets, written):
                if path in paths:
                    raise InputError(
                        f"two sessions or calls have the id {path} once redacted: choose one of"
                        " them"
                    )
                paths.add(path)
                file.write(element(path, value))
                advance("answers", len(paths), len(paths) + 1)
            file.write(end)
            written.size = file.tell()
        return written
    finally:
        reader.close()


def _answers(
    reader: RunReader, secrets: Secrets, written: WrittenFile
) -> Iterator[tuple[str, JSON]]:
    """Yield the paths of a file and their redacted values."""

    def encoded(text: str) -> str:
        return quote(secrets.redact(text), safe="!*'()")  # as JavaScript's `encodeURIComponent`

    run, rows = answer(reader, "api/run"), answer(reader, "api/sessions")
    run["run"] |= {"path": run["run"]["name"], "recording": False}
    yield "api/run", secrets.redact_values(run)
    yield "api/sessions", secrets.redact_values(rows)
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for row in rows["sessions"]:
        groups[row["group_id"]].append(row["session_id"])
    for session_ids in groups.values():
        compared: list[tuple[Found, bool]] = []
        for session_id in session_ids:
            path, found = f"api/sessions/{encoded(session_id)}", reader.session(session_id)
            session = answer(reader, f"api/sessions/{quote(session_id, safe='')}")
            yield path, secrets.redact_values(session)
            ids = [call.call_id for call in found.recorded.calls]
            calls = [
                call_json(reader.run, found, call_id, reader.text(), whole=False) for call_id in ids
            ]
            kinds = secrets.kinds([json_text(session)])
            in_tokens, hidden = redact_tokens(calls, secrets, everything=bool(kinds))
            for kind in kinds | in_tokens:
                written.secrets.setdefault(kind, set()).add(session_id)
            for call_id, call in zip(ids, calls, strict=True):
                if call["parent_id"] is not None:
                    call["prefix"] = f"{path}/calls/{encoded(call['parent_id'])}"
                yield f"{path}/calls/{encoded(call_id)}", _redacted_call(call, secrets)
            if len(session_ids) <= MOST_COMPARED:
                compared.append((found, hidden))
        for (a, hidden), (b, also_hidden) in combinations(compared, 2):
            values = compare_json(a, b, reader.text())
            if hidden or also_hidden:
                values["tokens"] = None
            path = (
                f"api/compare?a={encoded(a.recorded.session_id)}&b={encoded(b.recorded.session_id)}"
            )
            yield path, secrets.redact_values(values)


def _redacted_call(call: JSON, secrets: Secrets) -> JSON:
    """Return a call's answer without secrets in its texts. Log-probabilities have four decimals."""
    pieces = {name: call.pop(name) for name in ("prompt_pieces", "completion_pieces")}
    numbers = {
        name: call["call"].pop(name) for name in ("prompt_ids", "completion_ids", "logprobs")
    }
    values: JSON = secrets.redact_values(call) | pieces
    values["call"] |= numbers
    values["call"]["logprobs"] = [round(value, 4) for value in values["call"]["logprobs"]]
    return values


def redact_tokens(
    calls: Sequence[JSON], secrets: Secrets, *, everything: bool
) -> tuple[set[str], bool]:
    """Redact tokens in the answers of a session's calls, which have not the tokens of their
    parents.

    With `everything`, all are redacted where their text is not known. Returns the kinds of the
    secrets in the tokens, and whether tokens were redacted. Then those that show where prompts
    differ are removed: they are of several calls.
    """
    by_id = {call["call"]["call_id"]: call for call in calls}
    found: list[tuple[str, list[Piece]]] = []
    for last in by_id.keys() - {call["parent_id"] for call in calls}:
        path = path_to(last, lambda call_id: by_id[call_id]["parent_id"])
        pieces = [
            piece
            for each in path
            for name in _PARTS
            for piece in by_id[each][f"{name}_pieces"] or ()
        ]
        ends = [*accumulate(len(piece[0]) for piece in pieces)]
        for kind, start, end in secrets.find("".join(piece[0] for piece in pieces)):
            found.append((kind, pieces[bisect_right(ends, start) : bisect_left(ends, end) + 1]))
    for piece, is_first in (
        (piece, not i) for _, within in found for i, piece in enumerate(within)
    ):
        piece[:] = [REDACTED if is_first else "", piece[1], "redacted"]
    hidden = False
    for call, name in product(calls, _PARTS):
        ids, at = call["call"][f"{name}_ids"], 0
        unknown: list[Piece] = [["", len(ids), "redacted"]] if everything else []
        for _, number, *mark in call[f"{name}_pieces"] or unknown:
            if mark == ["redacted"]:
                ids[at : at + number] = [None] * number
                hidden = True
            at += number
    for call in calls if hidden else ():
        if call["difference"]:
            call["difference"] |= {"common": [], "recorded": [], "rendered": []}
            call["difference_text"] = None
    return {kind for kind, _ in found}, hidden


def element(path: str, value: Any) -> str:
    """Return the element with an answer."""
    packed = base64.b64encode(gzip.compress(json_text(value).encode(), mtime=0)).decode()
    return f'<script type="application/gzip+base64" data-path="{escape(path)}">{packed}</script>\n'


def page_html(page: Mapping[str, str]) -> tuple[str, str]:
    """Return the page before and after its answers, without anything that a browser would have to
    fetch.

    Modules are `data:` URLs in an import map, and their imports keys of it: those of a `data:` URL
    cannot be relative. The policy allows these, and the inline parts by their digests.
    """

    def module(name: str) -> str:
        folder = PurePosixPath("page", name).parent
        text = _IMPORT.sub(lambda found: f'{found[1]}"{folder / found[2]}"', page[name])
        return f"data:text/javascript;base64,{base64.b64encode(text.encode()).decode()}"

    modules = {f"page/{name}": module(name) for name in page if name.endswith(".js")}
    imports, begin = json.dumps({"imports": modules}), 'import "page/app.js";'
    styles = [page[name] for name in _STYLE.findall(page["index.html"])]
    html = _STYLE.sub(lambda found: f"<style>{page[found[1]]}</style>", page["index.html"])
    script = f'<script type="importmap">{imports}</script>\n<script type="module">{begin}</script>'
    policy = (
        f"default-src 'none'; script-src data: {_digests(imports, begin)}; style-src"
        f" {_digests(*styles)}; img-src data:; base-uri 'none'; form-action 'none'"
    )
    meta = (
        '<meta charset="utf-8">\n    <meta http-equiv="Content-Security-Policy"'
        f' content="{policy}">'
    )
    first, mark, last = (
        html.replace(_SCRIPT, script).replace('<meta charset="utf-8">', meta).rpartition("</body>")
    )
    return first, mark + last


def _digests(*texts: str) -> str:
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
