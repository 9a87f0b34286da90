"""The text that the checks are made on."""

from __future__ import annotations

import dataclasses

import numpy as np

from spec_jax.core.errors import UserError


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    """Rows that the target ran, padded to S.

    Attributes:
      tokens_S: ids.
      features_SLD: the drafter's planes, float32.
      hidden_SD: last hidden rows after the final norm, float32.
      length: rows that are real.
    """

    tokens_S: np.ndarray
    features_SLD: np.ndarray
    hidden_SD: np.ndarray
    length: int

    def tiled(self, size: int) -> Text:
        """The text over and over, `size` rows: as long as a slot may get."""
        at = np.arange(size) % self.length
        return Text(self.tokens_S[at], self.features_SLD[at], self.hidden_SD[at], size)

    def cut(self, length: int) -> Text:
        """The first rows, then zeros up to the same size."""
        return Text(
            self.tokens_S[:length],
            self.features_SLD[:length],
            self.hidden_SD[:length],
            length,
        ).padded(len(self.tokens_S))

    def padded(self, size: int) -> Text:
        """The real rows, then zeros up to `size`."""

        def pad(array):
            out = np.zeros((size, *array.shape[1:]), array.dtype)
            out[: self.length] = array[: self.length]
            return out

        return Text(
            pad(self.tokens_S), pad(self.features_SLD), pad(self.hidden_SD), self.length
        )


def noised(text: Text, rows, plane: int | None = None) -> Text:
    """The text with noise of its own size on some rows.

    Args:
      text: clean.
      rows: a slice of rows.
      plane: of the features; -1 is the last hidden rows, None everything.
    """
    rng = np.random.default_rng(5)
    features, hidden = text.features_SLD.copy(), text.hidden_SD.copy()

    def shake(array):
        size = float(np.sqrt(np.mean(np.square(array)))) if array.size else 0.0
        scale = 2 * size or 1.0
        return array + scale * rng.standard_normal(array.shape).astype(np.float32)

    if plane is None or plane == -1:
        hidden[rows] = shake(hidden[rows])
    if plane is None:
        features[rows] = shake(features[rows])
    elif plane >= 0:
        features[rows, plane] = shake(features[rows, plane])
    return dataclasses.replace(text, features_SLD=features, hidden_SD=hidden)


def require_rows(text_length: int, needed: int, where: str) -> None:
    """Refuses a text that the checks cannot be made on.

    Raises:
      UserError: it is too short.
    """
    if text_length < needed:
        raise UserError(
            f"{where} gives {text_length} rows, and the checks need {needed}; raise "
            "serve.max_new_tokens or use a longer prompt"
        )
