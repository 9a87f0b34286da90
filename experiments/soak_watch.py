"""Which programs of an engine ran, and at which edges of their buckets."""

from __future__ import annotations

from spec_jax.core.verify_layout import Ladder
from spec_jax.decode.budget import Choice
from spec_jax.decode.engine import Engine

Edge = tuple[str, int, int]  # ("rows", R, granted rows) or ("plain", R, 0)


def edges_of(ladder: Ladder) -> dict[Edge, tuple[int, int]]:
    """Every edge -> the (R, T) bucket that it belongs to.

    A bucket's edges are the most rows it holds and the fewest that the bucket
    before it does not; the first bucket of an R has the upper one alone.
    """
    found: dict[Edge, tuple[int, int]] = {}
    for requests, each in ladder.buckets:
        found["plain", requests, 0] = (requests, requests)
        for index, rows in enumerate(each):
            if index:
                found["rows", requests, each[index - 1] + 1] = (requests, rows)
            found["rows", requests, rows] = (requests, rows)
    return found


class Watch:
    """Sees every choice of an engine's planner, and plants some at the end.

    Attributes:
      edges: see `edges_of`.
      visited: edge -> how often its choice was made.
      programs: (draft, R, T) of every choice.
      wanted: edges to plant as soon as all R slots can take them.
      planted: how many were.
    """

    def __init__(self, engine: Engine):
        self.engine, self.edges = engine, edges_of(engine.ladder)
        self.visited: dict[Edge, int] = dict.fromkeys(self.edges, 0)
        self.programs: set[tuple[bool, int, int]] = set()
        self.planted = 0
        self.wanted: list[Edge] = []
        self._decide = engine.planner.decide
        self._choose = engine._choose
        engine.planner.decide = self.decide  # type: ignore[method-assign]
        engine._choose = self.choose  # type: ignore[method-assign]

    def close(self) -> None:
        """Leaves the engine as it was."""
        del self.engine.planner.decide, self.engine._choose

    def choose(self) -> Choice:
        """What runs, plain rounds included."""
        choice = self._choose()
        self.programs.add((choice.draft, choice.requests, choice.rows))
        if not choice.draft:
            self._visit(("plain", choice.requests, 0))
        return choice

    def decide(self, round_index, live, own_rows) -> Choice:
        """The planner's choice, or a planted one where all R slots can take it."""
        requests = self.engine.ladder.requests(max(live) + 1)
        if self.wanted and not own_rows and len(live) == requests:
            for edge in self.wanted:
                if edge[1] == requests:
                    self.wanted.remove(edge)
                    self.planted += 1
                    self._visit(edge)
                    rows = self.edges[edge][1]
                    return Choice(True, edge[2] - requests, requests, rows)
        choice = self._decide(round_index, live, own_rows)
        if choice.draft:
            planned = len(live) - len(own_rows)
            rows = planned + sum(own_rows.values()) + choice.budget
            self._visit(("rows", choice.requests, rows))
        return choice

    def _visit(self, edge: Edge) -> None:
        if edge in self.visited:
            self.visited[edge] += 1

    @property
    def missing(self) -> list[Edge]:
        """Edges that were never visited."""
        return [edge for edge, count in self.visited.items() if not count]
