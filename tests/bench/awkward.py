"""Replies with JSON, spacing and reasoning that a model may sample but a serialiser would not
write."""

import json
import random
from collections.abc import Sequence
from typing import Any

from tests.harness.programs import Action, Program, fill

_COMMANDS = [
    "ls -la",
    "ls /nonexistent-{n}",
    "exit 1",
    "printf 'out\\n'; printf 'err\\n' >&2; exit {n}",
    'for i in 1 2 3; do\n  echo "row $i"\ndone\n',
    "cat <<'EOF'\n  two  spaces, a tab\there\n\nand a \"quoted\" \\ line\nEOF",
    "echo 'naïve café — 東京 🎉 case {n}'",
    "printf '<%s>{{\"a\": 1}}</%s> & <b>' tool_call tool_call",
    "true",
    "cd {cwd} && ls",
    "find . -name 'x{n}' -exec echo {{}} \\;",
    "find . -name 'y{n}' -exec echo {{}} \\\\;",
    "echo 'trailing blanks'  \n\n",
    "seq 1 {n}00 | tail -n 3",
]
_CONTENTS = [
    "x = {n}\n",
    "héllo\n\n\ttab — 東京 🎉\n",
    '{{"a": 1.0, "b": [true, null]}}',
    "  no newline at the end {n}",
    "{n} \ttrailing  \nblanks\t\n\n\n",
]
_TEXTS = [
    "",
    "",
    "I look.",
    "So:\n\n",
    " \n",
    "Café — 東京 🎉:",
    "First `ls`,\n\n* then **more**\n",
    "  ok  ",
]
_ENDS = ["Done.", "  Done: naïve café 🎉\n", "Done.\n\n* one\n* two"]
_GAPS = ["", "", " ", "  ", "\n  ", "\t"]
_WORDS = [
    "the",
    "file",
    "may",
    "hold",
    "naïvely",
    "東京",
    "—",
    '"then"',
    "what\nwe",
    "want.\n\nSo",
    "I",
    "read",
    "it",
    "",
]


def replies(program: Program, rng: random.Random, cwd: str) -> list[str]:
    """Return the model's replies in one session: four to eight, of which the last ends the
    session."""
    turns = []
    for n in range(1, rng.randint(4, 8)):
        if program.texts:
            said = rng.choice(program.texts).format(n=n)
            turns.append(_thinking(rng) + rng.choice(_TEXTS) + said)
        else:
            turns.append(_reply(_calls(program, rng, n, cwd), rng))
    if program.end is not None:
        return [*turns, _reply([program.end], rng)]
    return [*turns, _thinking(rng) + rng.choice(_ENDS)]


def _calls(program: Program, rng: random.Random, n: int, cwd: str) -> list[Action]:
    """Return one or two tool calls with their arguments filled in."""
    number = 10 * n + rng.randint(1, 9)  # all turns differ: some harnesses detect loops
    chosen = rng.choices(program.actions, k=rng.choice([1, 1, 2]))
    calls = []
    for i, (name, arguments) in enumerate(chosen):
        calls.append((name, _filled(arguments, rng, n=number + 100 * i, cwd=cwd)))
    return calls


def _filled(arguments: dict[str, Any], rng: random.Random, **values: object) -> dict[str, Any]:
    def text(word: str) -> str:
        texts = {"COMMAND": _COMMANDS, "CONTENT": _CONTENTS}.get(word, [word])
        return rng.choice(texts).format(**values)

    found = {}
    for key, value in arguments.items():
        if not key.endswith("?") or rng.random() >= 0.5:
            found[key.removesuffix("?")] = fill(value, text)
    return found


def _reply(calls: Sequence[Action], rng: random.Random) -> str:
    blocks = [""]
    for name, arguments in calls:
        call = [
            f'"name":{rng.choice(_GAPS)}"{name}"',
            f'"arguments":{rng.choice(_GAPS)}{odd_json(arguments, rng)}',
        ]
        rng.shuffle(call)
        blocks.append(f"<tool_call>\n{{{rng.choice(_GAPS)}{', '.join(call)}}}\n</tool_call>")
    return _thinking(rng) + rng.choice(_TEXTS) + rng.choice(["\n", "\n\n", ""]).join(blocks)


def _thinking(rng: random.Random) -> str:
    """Return reasoning: none, empty, short, or some hundreds of tokens."""
    text = rng.choice([None, "", "I think.", " ".join(rng.choices(_WORDS, k=250))])
    if text is None:
        return ""
    return f"<think>\n{text}\n</think>" + rng.choice(["\n\n", "\n", " "])


def odd_json(value: Any, rng: random.Random) -> str:
    """Return JSON of `value` with its keys in random order and with unusual spacing, escapes and
    numbers."""

    def gapped(inner: Any) -> str:
        return rng.choice(_GAPS) + odd_json(inner, rng)

    if isinstance(value, dict):
        pairs = []
        for key in rng.sample(list(value), len(value)):
            pairs.append(f"{gapped(key)}{rng.choice(_GAPS)}:{gapped(value[key])}")
        return "{" + ",".join(pairs) + rng.choice(_GAPS) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gapped, value)) + rng.choice(_GAPS) + "]"
    if isinstance(value, bool) and rng.random() < 0.2:
        return f'"{json.dumps(value)}"'
    if isinstance(value, int) and not isinstance(value, bool):
        return rng.choice([f"{value}", f"{value}.0", f"{value}e0", f'"{value}"'])
    if rng.random() < 0.5:
        return json.dumps(value)
    text = json.dumps(value, ensure_ascii=False)
    if isinstance(value, str) and rng.random() < 0.5:
        text = text.replace("/", "\\/").replace("e", "\\u0065")
    return text
