"""Count the files, functions and hops between files of a streamed, continued Chat call through a
real recorder.

    python -m tests.bench.walk

The call is the second one of a session, with a tool, from CONNECT on a new connection until that is
closed: by then its row is committed. A hop is a call of a function of `addons` by a function of
another file of `addons`.
"""

import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from transformers import AutoTokenizer

from rolltap.addons.store.metadata import read_metadata
from tests.bench.frame import Rows, command, model_option
from tests.bench.processes import Mitmdump
from tests.recorder_process import CHAT
from tests.scripted_engine import Say, ScriptedEngine

NOTHING = {"type": "object", "properties": {}}
TOOL = {"type": "function", "function": {"name": "run", "parameters": NOTHING}}
CALL = '<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>'


class Walk:
    """The files, functions and hops of a call."""

    def __init__(self, functions: list[str], hops: list[tuple[str, str]]) -> None:
        self.functions = functions
        """As `file:name`, in the order of their first calls."""
        self.hops = Counter(map(tuple, hops))
        """Pairs of files: of the caller, and of the function."""
        self.files = Counter(function.partition(":")[0] for function in functions)
        """File -> its functions, in the order of their first calls."""


def walk(folder: Path, engine: ScriptedEngine, model: Path) -> Walk:
    """Return the walk of the call. `folder` is for the run and the log."""
    found = folder / "walk.json"
    run = folder / "run"
    recorder = Mitmdump.recorder(folder, run, engine, model).script("walker.py", bench_walk=found)
    engine.replies += [Say(f"I look.{CALL}"), Say("It is done.")]
    messages = [{"role": "user", "content": "Hello"}]
    with recorder:
        _ask(recorder, "GET", "https://api.openai.com/v1/models")
        # the first request of a recorder describes the engine, beside it
        while "engines" not in read_metadata(run):
            time.sleep(0.01)
        answer = json.loads(_post(recorder, {"messages": messages, "tools": [TOOL]}))
        reply = answer["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "42"}
        body = {"messages": [*messages, reply, result], "tools": [TOOL], "stream": True}
        assert _post(recorder, body).endswith("data: [DONE]\n\n")
    return Walk(**json.loads(found.read_text()))


def _post(recorder: Mitmdump, body: dict[str, Any]) -> str:
    return _ask(recorder, "POST", CHAT, json={"model": "m", **body})


def _ask(recorder: Mitmdump, method: str, url: str, **body: Any) -> str:
    """Ask on a new connection. Returns when it is closed."""
    proxy = f"http://s1:x@127.0.0.1:{recorder.port}"
    how = {"proxy": proxy, "verify": recorder.context(), "trust_env": False, "timeout": 600}
    with httpx.Client(**how) as client:
        response = client.request(method, url, **body)
    assert response.status_code == 200, response.text
    return response.text


@command
@model_option
def main(model: Path) -> dict[str, Rows]:
    """Count what a call visits."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    with tempfile.TemporaryDirectory() as folder, ScriptedEngine(tokenizer) as engine:
        found = walk(Path(folder), engine, model)
    total = {"files": len(found.files), "functions": len(found.functions)}
    total["hops"] = found.hops.total()
    callers: Counter[str] = Counter()
    callees: Counter[str] = Counter()
    hops = []
    for (caller, callee), number in found.hops.most_common():
        callers[caller] += number
        callees[callee] += number
        hops.append({"from": caller, "to": callee, "hops": number})
    files = []
    for file, functions in found.files.items():
        row = {"file": file, "functions": functions, "calls of other files": callers[file]}
        files.append(row | {"called by other files": callees[file]})
    return {"walk": [total], "files": files, "hops": hops}


if __name__ == "__main__":
    main()
