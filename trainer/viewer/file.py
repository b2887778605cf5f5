"""`rolltap view --out`: the page and some sessions of a run as one HTML file, which opens without a
network.

Its answers are elements, gzip as base64, one for each path that the page asks for. Secrets are
redacted, also in the tokens (`redaction`).
"""

import base64
import gzip
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from itertools import combinations
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from rolltap.addons.errors import InputError
from rolltap.addons.store.records import json_text
from rolltap.addons.store.staging import new_file
from rolltap.trainer.console import Advance
from rolltap.trainer.names import counted, some
from rolltap.trainer.runs.secrets import Secrets
from rolltap.trainer.runs.views.inspect import find_id
from rolltap.trainer.traces.reader import recorded_ids
from rolltap.trainer.viewer.answers import answer, page_files
from rolltap.trainer.viewer.data import JSON, call_json, compare_json
from rolltap.trainer.viewer.reader import LoadedSession, RunReader
from rolltap.trainer.viewer.redaction import redact_call, redact_tokens

MOST_SESSIONS = 50
"""Sessions of a file for which nothing has to be chosen."""
MOST_COMPARED = 16
"""Sessions of a group that can be compared in pairs."""
_IMPORT = re.compile(r'((?:^|[\s;}])(?:from|import)\s*)"\./([\w./-]+)"')
_STYLE = re.compile(r'<link rel="stylesheet" href="\./page/([\w./-]+)">')
_SCRIPT = '<script type="module" src="./page/app.js"></script>'
_META = '<meta charset="utf-8">'
_BEGIN = 'import "page/app.js";'


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
    chosen = recorded_ids(run)
    only = None
    if sessions is not None:
        chosen = only = {find_id(each, chosen, "session", str(run)) for each in sessions}
    elif len(chosen) > MOST_SESSIONS:
        raise InputError(
            f"{run} has {len(chosen)} sessions: choose those of the file with --sessions ID,..."
        )
    written = WrittenFile(len(chosen))
    reader = RunReader(run, only)
    try:
        while reader.step():
            advance("sessions read", reader.overview().progress["sessions"], len(chosen))
        begin, end = page_html(
            {name: file.read_text(encoding="utf-8") for name, file in page_files().items()}
        )
        paths: set[str] = set()
        with new_file(out, "w") as file:
            file.write(begin)
            for path, value in _Answers(reader, Secrets(redact), written).all():
                if path in paths:
                    raise InputError(
                        f"two sessions or calls have the id {path} once redacted: choose one of"
                        " them"
                    )
                paths.add(path)
                file.write(_element(path, value))
                advance("answers", len(paths), len(paths) + 1)
            file.write(end)
            written.size = file.tell()
        return written
    finally:
        reader.close()


class _Answers:
    """The paths of a file and their redacted values. What was redacted is noted in `written`."""

    def __init__(self, reader: RunReader, secrets: Secrets, written: WrittenFile) -> None:
        self._reader = reader
        self._secrets = secrets
        self._written = written
        self._hidden: set[str] = set()
        """Sessions of which tokens were redacted."""

    def all(self) -> Iterator[tuple[str, JSON]]:
        run = answer(self._reader, "api/run")
        run["run"]["path"] = run["run"]["name"]
        run["run"]["recording"] = False
        yield "api/run", self._secrets.redact_values(run)
        rows = answer(self._reader, "api/sessions")
        yield "api/sessions", self._secrets.redact_values(rows)
        groups: defaultdict[str, list[str]] = defaultdict(list)
        for row in rows["sessions"]:
            groups[row["group_id"]].append(row["session_id"])
        for session_ids in groups.values():
            yield from self._group(session_ids)

    def _group(self, session_ids: Collection[str]) -> Iterator[tuple[str, JSON]]:
        compared = []
        for session_id in session_ids:
            loaded = self._reader.session(session_id)
            yield from self._session(session_id, loaded)
            if len(session_ids) <= MOST_COMPARED:
                compared.append((session_id, loaded))
        for (a, first), (b, second) in combinations(compared, 2):
            values = compare_json(first, second, self._reader.text())
            if a in self._hidden or b in self._hidden:
                values["tokens"] = None
            path = f"api/compare?a={self._encoded(a)}&b={self._encoded(b)}"
            yield path, self._secrets.redact_values(values)

    def _session(self, session_id: str, loaded: LoadedSession) -> Iterator[tuple[str, JSON]]:
        path = f"api/sessions/{self._encoded(session_id)}"
        session = answer(self._reader, f"api/sessions/{quote(session_id, safe='')}")
        yield path, self._secrets.redact_values(session)
        calls = []
        for call in loaded.recorded.calls:
            text = self._reader.text()
            calls.append(call_json(self._reader.run, loaded, call.call_id, text, whole=False))
        kinds = self._secrets.kinds([json_text(session)])
        in_tokens, is_hidden = redact_tokens(calls, self._secrets, everything=bool(kinds))
        for kind in kinds | in_tokens:
            self._written.secrets.setdefault(kind, set()).add(session_id)
        if is_hidden:
            self._hidden.add(session_id)
        for values in calls:
            if values["parent_id"] is not None:
                values["prefix"] = f"{path}/calls/{self._encoded(values['parent_id'])}"
            call_path = f"{path}/calls/{self._encoded(values['call']['call_id'])}"
            yield call_path, redact_call(values, self._secrets)

    def _encoded(self, text: str) -> str:
        """Return an id in a path, as JavaScript's `encodeURIComponent` writes it."""
        return quote(self._secrets.redact(text), safe="!*'()")


def _element(path: str, value: Any) -> str:
    packed = _base64(gzip.compress(json_text(value).encode(), mtime=0))
    return f'<script type="application/gzip+base64" data-path="{escape(path)}">{packed}</script>\n'


def page_html(page: Mapping[str, str]) -> tuple[str, str]:
    """Return the page before and after its answers, without anything that a browser would have to
    fetch.

    Modules are `data:` URLs in an import map, and their imports keys of it: those of a `data:` URL
    cannot be relative. The policy allows these, and the inline parts by their digests.
    """
    modules = {}
    for name in page:
        if name.endswith(".js"):
            module = _base64(_module(page, name).encode())
            modules[f"page/{name}"] = f"data:text/javascript;base64,{module}"
    imports = json.dumps({"imports": modules})
    script = f'<script type="importmap">{imports}</script>\n<script type="module">{_BEGIN}</script>'
    html = page["index.html"].replace(_SCRIPT, script)
    styles = []
    for name in _STYLE.findall(html):
        styles.append(page[name])
        link = f'<link rel="stylesheet" href="./page/{name}">'
        html = html.replace(link, f"<style>{page[name]}</style>")
    policy = (
        f"default-src 'none'; script-src data: {_digests(imports, _BEGIN)}; style-src"
        f" {_digests(*styles)}; img-src data:; base-uri 'none'; form-action 'none'"
    )
    meta = f'{_META}\n    <meta http-equiv="Content-Security-Policy" content="{policy}">'
    begin, mark, end = html.replace(_META, meta).rpartition("</body>")
    return begin, mark + end


def _module(page: Mapping[str, str], name: str) -> str:
    """Return a module whose imports are keys of the import map."""
    folder = PurePosixPath("page", name).parent

    def absolute(found: re.Match[str]) -> str:
        return f'{found[1]}"{folder / found[2]}"'

    return _IMPORT.sub(absolute, page[name])


def _digests(*texts: str) -> str:
    digests = (_base64(hashlib.sha256(text.encode()).digest()) for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
