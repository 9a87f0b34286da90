"""Text of a growing answer: whole characters only, cut at a stop string.

Tokens do not respect characters or stop strings: a round may emit half a
character, half of "</end>", or a stop string and ten tokens after it. A
`TextStream` takes tokens one by one, hands out what is certain, and says at
which token a stop string was completed. Where it completes does not depend on
how the text was cut into tokens: the string that ends first counts, and of
those that end together the longest.
"""

from __future__ import annotations

from collections.abc import Iterable

from spec_jax.target.tokenizer import StreamDecoder, Tokenizer


class TextStream:
    """Incremental text of one request.

    The pieces that `push` and `finish` return add up to `text`, which is the
    decoding of the pushed ids up to the first stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Iterable[str] = (),
        skip_special: bool = True,
    ):
        """Starts with no text.

        Args:
          tokenizer: decodes ids.
          stops: strings that end the text; none of them is empty.
          skip_special: special tokens make no text.
        """
        self._decoder = StreamDecoder(tokenizer, skip_special=skip_special)
        self._stops = tuple(stops)
        self._held = ""  # decoded, but may be the beginning of a stop string
        self.text = ""
        self.matched: str | None = None

    def push(self, token_id: int) -> str:
        """Adds one id; returns the text that is now certain (may be empty).

        When a stop string is complete, `matched` names it: the text ends before
        it and nothing may be pushed any more.
        """
        if self.matched is not None:
            raise ValueError(
                f"token {token_id} follows the stop string {self.matched!r}; drop it"
            )
        self._held += self._decoder.push([token_id])
        found = first_stop(self._held, self._stops)
        if found is not None:
            at, self.matched = found
            return self._out(at)
        return self._out(len(self._held) - _could_begin(self._held, self._stops))

    def finish(self) -> str:
        """Ends the text: returns what was held back, half characters included."""
        if self.matched is None:
            self._held += self._decoder.flush()
            return self._out(len(self._held))
        return ""

    def _out(self, size: int) -> str:
        piece, self._held = self._held[:size], self._held[size:]
        self.text += piece
        return piece


def first_stop(text: str, stops: Iterable[str]) -> tuple[int, str] | None:
    """Start and string of the stop that ends first (then: the longest)."""
    found = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if not found:
        return None
    end, _, stop = min(found)
    return end - len(stop), stop


def _could_begin(text: str, stops: Iterable[str]) -> int:
    """Length of the longest end of `text` that begins some stop string."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest
