"""Options of the objectives and the sums they return."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from flax import struct

from spec_jax.core.errors import UserError

KINDS = ("ce", "dpace", "lk_alpha", "lk_lambda", "lk_tv")
LK_KINDS = ("alpha", "lambda", "tv")
TEACHER_MASSES = ("draft", "full")
TEACHER_ROWS = ("argmax", "label")

# The terms an objective is summed from, and what a drafter must give for each.
TERMS = {
    "ce": (),
    "soft_ce": ("teacher_XMD",),
    "l1": ("teacher_XMD",),
    "lk": ("teacher_XMD",),
    "smooth_l1": ("feature_XMD", "feature_target_XMD"),
    "confidence": ("confidence_XM", "teacher_XMD"),
    "selector": ("selector",),
}
TEACHER_TERMS = tuple(t for t, fields in TERMS.items() if "teacher_XMD" in fields)


@dataclasses.dataclass(frozen=True)
class ObjectiveOptions:
    """Which loss a drafter is trained with.

    Attributes:
      kind: the "ce" term: "ce"; "dpace" (CE, and every term's rows weigh what the
        accepted lengths need); "lk_alpha", "lk_lambda", "lk_tv"
        (likelihood-of-acceptance losses against hard labels).
      decay_gamma: draft j (from 1) weighs exp(-(j - 1) / gamma); 0 is flat. With
        "dpace" the two weights multiply; the public form of D-PACE is flat. A
        factor of 0.8 per draft (EAGLE-3) is a gamma of 4.48.
      dpace_alpha: floor of D-PACE's step survival, 0 to 1.
      kl_scale: weight of the CE or KL part of a "lambda" mix at acceptance 0.
      kl_decay: how fast that weight falls with acceptance.
      chunk_rows: rows whose logits exist at once; 0: all. With more than one
        chunk the logits are computed again in the backward pass.
      ce: weight of the term of that name; None: the drafter's own weight; 0: off.
      soft_ce: as `ce`.
      l1: as `ce`.
      lk: as `ce`.
      smooth_l1: as `ce`.
      confidence: as `ce`.
      selector: as `ce`.
      lk_kind: "alpha", "lambda" or "tv": the "lk" term.
      teacher_mass: what p is where the draft vocabulary is reduced. "draft":
        renormalised over it; acceptance is then overestimated by what p has
        outside, in `l1`, `lk`, the confidence's target and every metric of overlap
        or calibration: comparable between drafters of one vocabulary, too good as
        a forecast of sampled serving. "full": the full vocabulary's softmax,
        restricted to it: acceptance as it is, for a confidence that plans are made
        from or figures beside another vocabulary's; costs the whole head a row.
      teacher_rows: which rows a renormalised p counts in; in the others acceptance
        is 0. "argmax": those whose likeliest token of the whole vocabulary is in
        the draft vocabulary, as EAGLE-3's supervised mask has it; costs the whole
        head once a row. "label": those whose label is; for greedy text they are the
        same, at the cost of the draft vocabulary's columns alone; of sampled text a
        row whose label, but not its favourite, lies outside counts as 0 too.
      selector_warmup: share of training in which the selector's weight is 0.
      selector_ramp: share of training after it in which that weight grows
        linearly to its full size.
      selector_stop_gradient: the selector's loss moves the selector alone, not
        the logits and hidden rows it reads.
    """

    kind: str = "ce"
    decay_gamma: float = 0.0
    dpace_alpha: float = 0.5
    kl_scale: float = 1.0
    kl_decay: float = 1.0
    chunk_rows: int = 0
    ce: float | None = None
    soft_ce: float | None = None
    l1: float | None = None
    lk: float | None = None
    smooth_l1: float | None = None
    confidence: float | None = None
    selector: float | None = None
    lk_kind: str = "alpha"
    teacher_mass: str = "draft"
    teacher_rows: str = "argmax"
    selector_warmup: float = 0.0
    selector_ramp: float = 0.0
    selector_stop_gradient: bool = False

    def __post_init__(self):
        for name, known in (
            ("kind", KINDS),
            ("lk_kind", LK_KINDS),
            ("teacher_mass", TEACHER_MASSES),
            ("teacher_rows", TEACHER_ROWS),
        ):
            if getattr(self, name) not in known:
                raise UserError(
                    f"objective.{name}={getattr(self, name)!r} must be one of "
                    f"{', '.join(known)}"
                )
        if self.teacher_mass == "full" and self.teacher_rows != "argmax":
            raise UserError(
                f"objective.teacher_rows={self.teacher_rows!r} has no place beside "
                "objective.teacher_mass='full', where every supervised row counts; "
                "leave it out"
            )
        for name in ("decay_gamma", "kl_scale", "kl_decay", "chunk_rows"):
            if not getattr(self, name) >= 0:
                raise UserError(
                    f"objective.{name}={getattr(self, name)} must not be negative"
                )
        for name in ("dpace_alpha", "selector_warmup", "selector_ramp"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(
                    f"objective.{name}={getattr(self, name)} must lie between 0 and 1"
                )
        if self.selector_warmup + self.selector_ramp > 1:
            raise UserError(
                f"objective.selector_warmup={self.selector_warmup} and "
                f"objective.selector_ramp={self.selector_ramp} are more than the whole "
                "training; lower them until their sum is at most 1"
            )
        for term in TERMS:
            weight = getattr(self, term)
            if weight is not None and not (weight >= 0 and math.isfinite(weight)):
                raise UserError(
                    f"objective.{term}={weight} must be a finite weight, 0 or above; "
                    "leave it out to keep the drafter's own"
                )


def active_terms(options: ObjectiveOptions, terms) -> dict[str, float]:
    """The terms that count, by name: the drafter's own under the options.

    Args:
      options: overrides.
      terms: the drafter's pairs (term, weight).

    Raises:
      UserError: an unknown term, no term left, or a kind of a term that is off.
      ValueError: a weight of the drafter that is not one.
    """
    own = dict(terms)
    for name, weight in own.items():
        if name not in TERMS:
            raise UserError(
                f"drafter.terms names {name!r}, which is no loss term; known: "
                f"{', '.join(TERMS)}"
            )
        if not (weight >= 0 and math.isfinite(weight)):
            raise ValueError(f"drafter.terms: {name}={weight} must be 0 or above")
    given = {name: getattr(options, name) for name in TERMS}
    merged = {n: own.get(n, 0.0) if w is None else w for n, w in given.items()}
    active = {name: weight for name, weight in merged.items() if weight > 0}
    if not active:
        raise UserError(
            "objective switches every loss term off; set one of "
            f"{', '.join(f'objective.{name}' for name in TERMS)} above 0"
        )
    if options.kind.startswith("lk_") and "ce" not in active:
        raise UserError(
            f"objective.kind={options.kind!r} shapes the term ce, which is off; set "
            "objective.ce above 0, or objective.kind='ce' and use objective.lk"
        )
    return active


@struct.dataclass
class LossSums:
    """A loss as a numerator and its denominator.

    Divide once, after the sums over accumulation steps and devices; a mean of
    means would weigh a row by how its batch was cut.

    Attributes:
      numerator: weighted sum of the rows' losses; the only differentiated part.
      denominator: sum of the weights.
    """

    numerator: jnp.ndarray  # []
    denominator: jnp.ndarray  # []

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(
            self.numerator + other.numerator, self.denominator + other.denominator
        )

    def mean(self):
        """The loss; 0 where nothing was supervised."""
        return self.numerator / jnp.maximum(self.denominator, 1e-12)
