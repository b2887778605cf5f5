"""Count the files, functions and hops between files of a streamed, continued Chat call through a
real recorder.

    python -m tests.bench.walk

The call is the second one of a session, with a tool, from CONNECT on a new connection until that is
closed: by then its row is committed. A hop is a call of a function of `addons` by a function of
another file of `addons`.
"""

import json
import ssl
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx
from transformers import AutoTokenizer

from rolltap.addons.store.metadata import read_metadata
from tests.bench.frame import Rows, command, model_option
from tests.bench.processes import Mitmdump
from tests.recorder_process import ADDON, CHAT
from tests.scripted_engine import Say, ScriptedEngine

WALKER = Path(__file__).with_name("walker.py")
TOOL = {
    "type": "function",
    "function": {"name": "run", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>'


class Walk:
    """The files, functions and hops of a call."""

    def __init__(self, found: dict) -> None:
        self.functions: list[str] = found["functions"]
        """As `file:name`, in the order of their first calls."""
        self.hops = Counter((caller, callee) for caller, callee in found["hops"])
        """Pairs of files: of the caller, and of the function."""
        self.files = list(dict.fromkeys(function.partition(":")[0] for function in self.functions))


def walk(folder: Path, engine: ScriptedEngine, model: Path) -> Walk:
    """Return the walk of the call. `folder` is for the run and the log."""
    found = folder / "walk.json"
    run = folder / "run"
    settings = {
        "rolltap_out": run,
        "rolltap_engine": engine.url,
        "rolltap_model": model,
        "bench_walk": found,
    }
    recorder = Mitmdump("recorder", folder, [WALKER, ADDON], settings)
    engine.replies += [Say(f"I look.{CALL}"), Say("It is done.")]
    messages = [{"role": "user", "content": "Hello"}]
    with recorder:
        _ask(recorder, "GET", "https://api.openai.com/v1/models")
        while "engines" not in read_metadata(
            run
        ):  # the first request of a recorder describes the engine, beside it
            time.sleep(0.01)
        reply = json.loads(_post(recorder, {"messages": messages, "tools": [TOOL]}))["choices"][0][
            "message"
        ]
        result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "42"}
        body = {"messages": [*messages, reply, result], "tools": [TOOL], "stream": True}
        assert _post(recorder, body).endswith("data: [DONE]\n\n")
    return Walk(json.loads(found.read_text()))


def _post(recorder: Mitmdump, body: dict) -> str:
    return _ask(recorder, "POST", CHAT, json={"model": "m", **body})


def _ask(recorder: Mitmdump, method: str, url: str, **body: dict) -> str:
    """Ask on a new connection. Returns when it is closed."""
    how = {
        "proxy": f"http://s1:x@127.0.0.1:{recorder.port}",
        "verify": ssl.create_default_context(cafile=recorder.ca),
    }
    with httpx.Client(**how, trust_env=False, timeout=60) as client:
        response = client.request(method, url, **body)
    assert response.status_code == 200, response.text
    return response.text


@command
@model_option
def main(model: Path) -> dict[str, Rows]:
    """Count what a call visits."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ScriptedEngine(AutoTokenizer.from_pretrained(model)) as engine,
    ):
        found = walk(Path(folder), engine, model)
    total = {
        "files": len(found.files),
        "functions": len(found.functions),
        "hops": found.hops.total(),
    }
    files = [
        {
            "file": file,
            "functions": sum(function.startswith(f"{file}:") for function in found.functions),
            "calls of other files": sum(
                n for (caller, _), n in found.hops.items() if caller == file
            ),
            "called by other files": sum(
                n for (_, callee), n in found.hops.items() if callee == file
            ),
        }
        for file in found.files
    ]
    hops = [
        {"from": caller, "to": callee, "hops": n}
        for (caller, callee), n in found.hops.most_common()
    ]
    return {"walk": [total], "files": files, "hops": hops}


if __name__ == "__main__":
    main()
