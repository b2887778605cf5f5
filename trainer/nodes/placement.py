"""Gives groups to nodes: a state machine without I/O. `schedule` carries out what it says.

    submitted -> queue -> held by a node -> closed
                   ^            |
                   +-- again ---+   the node is lost: those of its sessions that have not ended

A group goes to one node as a whole, so that its sessions share the prefix cache of that node's engines. It goes to the
node with the most free slots, and waits while no node has one: a slow node frees few, and gets few. A node may hold
more sessions than slots then, less than a group more; they wait there for slots that are prepared for.
"""

import heapq
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlsplit

from rolltap.addons.store.records import Session
from rolltap.trainer.rollouts.resume import NOT_RUN, attempt_of, next_attempt, place_of


class Piece(NamedTuple):
    """Sessions of a group that one node runs; after a loss a group may have several."""

    order: tuple[bool, int, int]
    """Pieces that evaluate come first, then those of a higher priority, then the older ones."""
    group_id: str
    session_ids: tuple[str, ...]


@dataclass(slots=True)
class _Node:
    slots: int
    pieces: dict[str, Piece] = field(default_factory=dict)
    """Group -> its piece on this node."""
    left: set[str] = field(default_factory=set)
    """Places of sessions that have not ended for good."""


@dataclass(slots=True)
class Placement:
    """The nodes of a fleet and the pieces that wait or are held."""

    _nodes: dict[str, _Node] = field(default_factory=dict)
    _queue: list[Piece] = field(default_factory=list)
    _submitted: int = 0

    def join(self, node: str, slots: int) -> None:
        """Take a node with so many slots."""
        self._nodes[node] = _Node(slots)

    def lost(self, node: str) -> list[Piece]:
        """Forget a node. Return the pieces that it held."""
        gone = self._nodes.pop(node, None)
        return [*gone.pieces.values()] if gone else []

    def submit(self, group_id: str, session_ids: Sequence[str], *, evaluates: bool = False, priority: int = 0) -> None:
        """Queue sessions of a group."""
        self._submitted += 1
        heapq.heappush(self._queue, Piece((not evaluates, -priority, self._submitted), group_id, tuple(session_ids)))

    def again(self, piece: Piece, session_ids: Sequence[str]) -> None:
        """Queue what is left of a lost piece, at its old place in the order."""
        heapq.heappush(self._queue, piece._replace(session_ids=tuple(session_ids)))

    def drop(self, group_id: str) -> list[Piece]:
        """Take a group out of the queue, and return what waited there."""
        dropped = [piece for piece in self._queue if piece.group_id == group_id]
        self._queue = [piece for piece in self._queue if piece.group_id != group_id]
        heapq.heapify(self._queue)
        return dropped

    def ended(self, node: str, session: Session) -> None:
        """Note the end of a session, which frees a slot unless its node may retry it."""
        if node in self._nodes and session.status != "infrastructure":
            self._nodes[node].left.discard(place_of(session.session_id))

    def closed(self, node: str, group_id: str) -> Piece | None:
        """Note that nothing of a group is left on a node, and return the piece."""
        own = self._nodes.get(node)
        piece = own.pieces.pop(group_id, None) if own else None
        if own and piece:
            own.left.difference_update(map(place_of, piece.session_ids))
        return piece

    def advance(self, resting: Collection[str] = ()) -> Iterator[tuple[str, Piece]]:
        """Yield which node gets which piece now. Nodes that are `resting` get none."""
        waiting, self._queue = self._queue, []
        while waiting:
            piece = heapq.heappop(waiting)
            free = {
                name: node.slots - len(node.left)
                for name, node in self._nodes.items()
                if name not in resting and piece.group_id not in node.pieces and len(node.left) < node.slots
            }
            if free:
                name = max(free, key=lambda name: free[name])
                self._hold(name, piece)
                yield name, piece
            else:
                self._queue.append(piece)  # sorted, as they come out of a heap
                if not any(len(node.left) < node.slots for node in self._nodes.values()):
                    self._queue += sorted(waiting)
                    return

    def pieces(self, group_id: str | None = None) -> list[Piece]:
        """Return the pieces that nodes hold and that wait, of one group or of all."""
        pieces = [*self._queue, *(piece for node in self._nodes.values() for piece in node.pieces.values())]
        return [piece for piece in pieces if group_id in (None, piece.group_id)]

    def waiting(self) -> int:
        """Return the number of sessions in the queue."""
        return sum(len(piece.session_ids) for piece in self._queue)

    def _hold(self, name: str, piece: Piece) -> None:
        node = self._nodes[name]
        node.pieces[piece.group_id] = piece
        node.left.update(map(place_of, piece.session_ids))


def run_again(
    session_ids: Iterable[str], ended: Iterable[Session], submitted: Iterable[str], retries: int
) -> list[str]:
    """Return the ids of the sessions of a lost piece that are run elsewhere.

    `ended` are all attempts at them, in their order, and `submitted` the ids with which their group was submitted. One
    that did not run to its end is retried as the next attempt unless its `retries` since then are used up. One that had
    not begun keeps its id.
    """
    last = {place_of(session.session_id): session for session in ended}
    first = {place_of(name): attempt_of(name) for name in submitted}
    again = []
    for name in session_ids:
        session = last.get(place_of(name))
        if session is None:
            again.append(name)
            continue
        tried = attempt_of(session.session_id) - first.get(place_of(name), attempt_of(name))
        if session.status in NOT_RUN and tried < retries:
            again.append(next_attempt(session.session_id))
    return again


def deal(engines: Sequence[str], dealt: Iterable[Sequence[str]], nodes: int, host: str = "") -> list[str]:
    """Return the engines of a further node of about so many `nodes`.

    They are those on its own `host`, then those that the others, `dealt`, use least.
    """
    used = [url for own in dealt for url in own]
    least = sorted(engines, key=lambda url: (urlsplit(url).hostname != host, used.count(url)))  # stable
    return least[: max(1, len(engines) // max(1, nodes))]
