"""Template: the prompt as in training and as served."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from spec_jax.evals.why.findings import DIFFERS, OK, Finding


def template_findings(
    trained: list[int],
    served: list[int],
    decode: Callable[[list[int]], str],
    special_ids: Iterable[int],
) -> Iterator[Finding]:
    """The prompt's ids as in training and as served, its special tokens first.

    Args:
      trained: ids as training renders them.
      served: ids as serving renders them.
      decode: ids -> text.
      special_ids: ids of the tokenizer's special tokens.
    """
    special = set(special_ids)

    def marks(ids):
        return [i for i in ids if i in special]

    if marks(trained) != marks(served):
        yield Finding(
            "template",
            "special tokens",
            DIFFERS,
            f"training sees {decode(marks(trained))!r}, serving "
            f"{decode(marks(served))!r}; render both through one template",
        )
    else:
        yield Finding("template", "special tokens", OK, f"{len(marks(served))} of them")
    at = next(
        (i for i, (a, b) in enumerate(zip(trained, served, strict=False)) if a != b),
        min(len(trained), len(served)),
    )
    if trained == served:
        yield Finding("template", "token ids", OK, f"{len(served)} tokens")
    else:
        yield Finding(
            "template",
            "token ids",
            DIFFERS,
            f"training and serving differ from token {at} on: "
            f"{decode(trained[at : at + 8])!r} and {decode(served[at : at + 8])!r}",
        )
