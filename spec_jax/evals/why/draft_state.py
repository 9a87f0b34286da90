"""Draft state: one piece, chunks, rounds give the same proposals."""

from __future__ import annotations

from collections.abc import Iterator

from spec_jax.evals.why.findings import Finding, verdict
from spec_jax.evals.why.logits import slots_apart
from spec_jax.evals.why.runner import Drafts, Runner
from spec_jax.evals.why.text import Text


def drafts_finding(
    item: str, runner: Runner, found: Drafts, expected: Drafts
) -> Finding:
    """The drafts of a state built another way against those of one piece."""
    gaps, allowed, slot = slots_apart(runner, expected.logits_MU, found.logits_MU)
    fault = ""
    if slot is not None:
        fault = (
            f"slot {slot} differs first, by {gaps[slot]:.3g} (allowed "
            f"{allowed:.2g}), from the state built in one piece"
        )
    return verdict("draft state", item, fault, f"max abs {gaps.max():.1e}")


def state_findings(
    runner: Runner, text: Text, anchor: int, chunk: int, window: int
) -> Iterator[Finding]:
    """A state in one piece, in chunks, and after rounds of changing length.

    Args:
      runner: the drafter.
      text: rows.
      anchor: rows absorbed.
      chunk: rows of a chunk.
      window: W, rows of a round; those past its own length are junk.
    """
    expected, token = runner.serve(text, anchor), int(text.tokens_S[anchor])
    state = runner.empty()
    for start in range(0, anchor, chunk):
        count = min(chunk, anchor - start)
        state = runner.absorb(state, text, start, count, chunk, extend=False)
    found = runner.propose(state, token, anchor)
    yield drafts_finding("chunks", runner, found, expected)
    state, start, turn = runner.empty(), 0, 0
    while start < anchor:
        if start < anchor // 2:
            count, extend, width = min(chunk, anchor // 2 - start), False, chunk
        else:
            count, extend, width = 1 + turn % window, True, window
            count = min(count, anchor - start)
            turn += 1
        state = runner.absorb(state, text, start, count, width, extend=extend)
        start += count
    found = runner.propose(state, token, anchor)
    yield drafts_finding("a prefix, then rounds", runner, found, expected)
