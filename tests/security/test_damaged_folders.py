"""Damaged run folders, whatever the damage is: a message, in bounded time and memory."""

import json
import random
import shutil
from pathlib import Path

import pytest

from rolltap.addons.store.tables import TABLES, run_files
from tests.deep import DEEP
from tests.security.run_folders import ROWS, add_row, attempt, commands, sound_run

NUMBER = 500 if DEEP else 20
MOST_KIB = 1 << 20
"""Memory of the process that reads the folders, with all that it imports."""
TEXTS = [None, "", "\0", "[", "{}", "[]", "null", "\x1b[2J", '"\\ud800"']
TEXTS += ["[" * 5_000, "9" * 5_000, "a" * 100_000]
NUMBERS = [-1, 0, 2**31 - 1, 1e308, -1e308, float("nan"), float("inf")]
LISTS = [[], [None], [2**31 - 1] * 99]
BYTES = [b"", b"\xff" * 9]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return sound_run(tmp_path_factory.mktemp("sound") / "run")


def flip(chance, path):
    data = bytearray(path.read_bytes())
    for _ in range(chance.choice([1, 1, 8, 200])):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def cut(chance, path):
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data))])


def swap(chance, path):
    """Exchange two parts of a file, or write one over the other."""
    data = bytearray(path.read_bytes())
    size = chance.choice([1, 4, 8, 64])
    most = max(1, len(data) - size)
    a = chance.randrange(0, most, 4)
    b = chance.randrange(0, most, 4)
    parts = [data[a : a + size], data[b : b + size]]
    data[a : a + size] = parts[1]
    data[b : b + size] = chance.choice(parts)
    path.write_bytes(data)


def number(chance, path):
    """Write a number that is too large, or negative, at a place of 4 or 8 bytes."""
    data = bytearray(path.read_bytes())
    at = chance.randrange(0, len(data) - 8, 4)
    data[at : at + 4] = chance.choice([2**31 - 1, 2**32 - 1, 2**31, 2**20]).to_bytes(4, "little")
    path.write_bytes(data)


def mix(chance, path):
    """Give a file the contents of another."""
    others = sorted(each for each in path.parent.iterdir() if each.is_file())
    path.write_bytes(chance.choice(others).read_bytes())


def repeat(chance, path):
    path.write_bytes(path.read_bytes() * chance.choice([2, 50]))


def garbage(chance, path):
    path.write_bytes(path.read_bytes() + chance.randbytes(chance.choice([1, 8, 9, 10_000])))


def value(chance, path):
    """Add rows with hostile values, whose digests are right."""
    table = chance.choice(sorted(TABLES))
    for _ in range(20):
        names = chance.sample(sorted(ROWS[table]), chance.choice([1, 1, 2, 4]))
        hostile = TEXTS + NUMBERS + LISTS + BYTES
        try:
            add_row(path.parent, table, **{name: chance.choice(hostile) for name in names})
        except Exception:  # a value that its column cannot hold
            continue
        return


def metadata(chance, path):
    try:
        values = json.loads((path.parent / "run.json").read_text())
    except ValueError:  # it is damaged already
        return
    more = ["engines", "recorders", "left_behind", "merged_from", "schema_version"]
    values[chance.choice([*values, *more])] = chance.choice(TEXTS + NUMBERS + LISTS)
    (path.parent / "run.json").write_text(json.dumps(values))


def used():
    """Return the most memory that this process has had, in KiB."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])


DAMAGES = [flip, cut, swap, number, mix, repeat, garbage, metadata]
DAMAGES += [flip, swap, number, value, value, value, value]


@pytest.mark.parametrize("seed", range(NUMBER))
def test_a_damaged_folder_is_read_or_refused_with_a_message(whole, tmp_path, seed):
    chance = random.Random(seed)
    run = shutil.copytree(whole, tmp_path / "run")
    before = used()
    for _ in range(chance.choice([1, 1, 2, 5])):
        files = sorted(path for path in run.iterdir() if path.is_file() and path.stat().st_size > 8)
        chance.choice(DAMAGES)(chance, chance.choice(files))
    ways = commands(run, tmp_path / "out")
    names = list(ways) if DEEP else ["verify", *chance.sample(list(ways), 3)]
    for name in names:
        attempt(ways[name])
    assert run_files(run, "calls")
    assert used() - before < MOST_KIB
