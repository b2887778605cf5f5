"""Mistakes, one a line, and the error that a type checker reports for each. It is checked, not
run."""

# ruff: noqa: B018

import rolltap
from rolltap import errors, types

run = rolltap.open_rum("runs/a")  # error: attr-defined
run = rolltap.open_run(b"runs/a")  # error: arg-type
run.traces("merged")  # error: arg-type
run.traces(roles=["boss"])  # error: list-item
run.batch()  # error: attr-defined
run.traces().batch().traces[0].tokens  # error: attr-defined
run.export("csv", "out")  # error: arg-type
rolltap.rollout([], harness="codex", engine="u", model="m")  # error: call-arg
rolltap.rollout([], harness="pi", engine="u", model="m", out="o", sessions="8")  # error: arg-type
rolltap.rollout(["t"], harness="codex", engine="u", model="m", out="o")  # error: list-item
rolltap.Session(session_id="s", status="done")  # error: arg-type
rolltap.Recorder("o", engine="u").environment("s")  # error: call-arg
text: str = rolltap.Trace.to_json  # error: assignment
errors.EngineFailure  # error: attr-defined
types.Strategie  # error: attr-defined
