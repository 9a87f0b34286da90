"""Plan: how many rows of each request the target verifies.

`static` verifies the full window. The other modes spend a budget of K draft rows
over the whole batch on the drafts most likely to be reached: the K best by
current survival, the running product of calibrated confidence. `cap_accept` runs
the full window and commits inside the plan only, which tells what a plan loses;
`compact` runs the planned rows alone.

The plan never reads a drawn token it could cut: confidence at j may depend on
d_<j only (drafts that are looked up are drawn by nobody: they are text), survival
does not rise along a request, and ties go to the earlier position. A plan that looks
at its own token, or breaks ties the other way, is biased (article 5.5; planted in the
law tests). K comes from the host, which knows earlier rounds only.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from spec_jax.core.errors import UserError
from spec_jax.core.proposal import Proposal
from spec_jax.core.shapes import bind
from spec_jax.decode.state import Slots
from spec_jax.sampling import transform

STATIC, CAP_ACCEPT, COMPACT = "static", "cap_accept", "compact"
MODES = (STATIC, CAP_ACCEPT, COMPACT)


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """Static choices of a planned round.

    Attributes:
      mode: "static", "cap_accept" or "compact".
      temperatures: of the confidence, one per draft position; () is all one.
      by_regime: pairs (sampling regime, temperatures) for requests of that regime
        (`decode.regimes`); the others have `temperatures`.
      survival_eps: a draft that is reached with no more than this is not run.
      min_verify_len: rows every planned request gets, anchor included; they are
        part of the budget.
      max_verify_len: rows no planned request exceeds; 0 is the window.
      collect: also report the raw confidence (to fit temperatures), which costs
        a pass over the drafter's logits where it has no head for it.
    """

    mode: str = STATIC
    temperatures: tuple[float, ...] = ()
    by_regime: tuple[tuple[str, tuple[float, ...]], ...] = ()
    survival_eps: float = 1e-6
    min_verify_len: int = 1
    max_verify_len: int = 0
    collect: bool = False

    def __post_init__(self):
        if self.mode not in MODES:
            raise UserError(f"mode={self.mode!r} must be one of {MODES}")
        if not 0 <= self.survival_eps < 1:
            raise UserError(f"plan.survival_eps={self.survival_eps} must lie in [0, 1)")
        if self.min_verify_len < 1:
            raise UserError(
                f"plan.min_verify_len={self.min_verify_len} must be at least 1, the "
                "anchor"
            )
        if self.max_verify_len and self.max_verify_len < self.min_verify_len:
            raise UserError(
                f"plan.max_verify_len={self.max_verify_len} is below "
                f"plan.min_verify_len={self.min_verify_len}; 0 is the whole window"
            )
        named = [regime for regime, _ in self.by_regime]
        if len(set(named)) < len(named) or not all(t for _, t in self.by_regime):
            raise UserError(
                f"sts.temperatures of the sampling regimes {named} must be one "
                "non-empty list for each regime; name each once"
            )
        given = (self.temperatures, *dict(self.by_regime).values())
        for each in given:
            if any(not t > 0 for t in each):
                raise UserError(f"sts.temperatures={each} must be positive")
        if len({len(each) for each in given if each}) > 1:
            raise UserError(
                "sts.temperatures of several regimes differ in length, "
                f"{[len(each) for each in given if each]}; fit all for one drafter"
            )

    @property
    def is_planned(self) -> bool:
        """A budget decides; else every window is full."""
        return self.mode != STATIC

    @property
    def is_packed(self) -> bool:
        """Only the planned rows run, in a program of so many rows."""
        return self.mode == COMPACT

    @property
    def num_own(self) -> int:
        """M, where requests have temperatures of their regime's; else 0."""
        return len(self.by_regime[0][1]) if self.by_regime else 0

    def temperatures_of(self, regime: str) -> tuple[float, ...]:
        """Temperatures `[M]` of a request of this regime."""
        given = dict(self.by_regime).get(regime, self.temperatures)
        return given or (1.0,) * self.num_own

    def bounds(self, window: int) -> tuple[int, int]:
        """Fewest and most rows of a planned request in a window of W."""
        most = min(self.max_verify_len or window, window)
        return min(self.min_verify_len, most), most


def confidence_logit(proposal: Proposal):
    """Log-odds `[B, M]` that a draft is accepted, given that it is reached.

    The drafter's own estimate, or else the log-odds of max q, where q is the
    untempered softmax of the law's logits (after correction, before any greedy
    mask). Of what was drawn, both know d_<j only.

    Raises:
      UserError: a tree, or drafts that were chosen and not drawn from a law,
        without a confidence of their own.
    """
    if proposal.parents_BW is not None:
        raise UserError(
            "mode must be 'static' for a tree: its nodes have no confidence to plan "
            "with"
        )
    if proposal.confidence_logit_BM is not None:
        return proposal.confidence_logit_BM.astype(jnp.float32)
    if proposal.law.is_certain:
        raise UserError(
            "mode must be 'static' for this drafter: its drafts are not drawn from "
            "a law, and it gives no confidence to plan with"
        )
    logits_BMU = proposal.law.logits_BTV.astype(jnp.float32)
    first_BM, top_BM = transform.argmax(logits_BMU)
    is_first_BMU = jnp.arange(logits_BMU.shape[-1]) == first_BM[..., None]
    # Summed without the maximum itself, so that certainty keeps its digits.
    weights_BMU = jnp.exp(logits_BMU - top_BM[..., None])
    rest_BM = jnp.where(is_first_BMU, 0.0, weights_BMU).sum(-1)
    return -jnp.log(rest_BM)


def survival(logit_BM, temperatures: tuple[float, ...] = (), own_BM=None):
    """Probability `[B, M]` float32 that each draft is reached and accepted.

    Args:
      logit_BM: log-odds of confidence.
      temperatures: one per position; () is all one.
      own_BM: temperatures of each request instead.

    Raises:
      UserError: not one temperature per draft.
    """
    num_draft = logit_BM.shape[1]
    size = len(temperatures) if own_BM is None else own_BM.shape[1]
    if size not in (0, num_draft):
        raise UserError(
            f"sts.temperatures has {size} values, but a proposal has {num_draft} "
            "drafts; fit them for this length"
        )
    scale = own_BM
    if scale is None:
        scale = jnp.asarray(temperatures or (1.0,) * num_draft, jnp.float32)
    confidence_BM = jax.nn.sigmoid(logit_BM / scale)
    # A row whose logits define nothing is not worth running.
    confidence_BM = jnp.where(jnp.isnan(confidence_BM), 0.0, confidence_BM)
    return jnp.cumprod(confidence_BM, 1)


def rank(survival_BM):
    """Place `[B, M]` of each draft: survival descending, position, request.

    The second key keeps a request's places in order even where its survival is
    flat, so admitting the first K admits a prefix of every request.
    """
    size_b, num_draft = survival_BM.shape
    flat_X = survival_BM.T.reshape(-1)  # position before request
    order_X = jnp.argsort(-flat_X, stable=True)
    place_X = jnp.zeros_like(order_X).at[order_X].set(jnp.arange(order_X.size))
    return place_X.reshape(num_draft, size_b).T


def own_rows(slots: Slots, window: int):
    """Rows `[B]` of requests no budget decides for, anchor included; else 0.

    Those are requests with speculation off, and those with a window of their own.
    """
    own_B = jnp.minimum(slots.window_B, window)
    return jnp.where(slots.speculate_B, own_B, 1).astype(jnp.int32)


def static_window(slots: Slots, proposal: Proposal):
    """`verify_len_B` of full windows, anchor included."""
    window = proposal.tokens_BM.shape[1] + 1
    own_B = own_rows(slots, window)
    return jnp.where(own_B > 0, own_B, window).astype(jnp.int32)


def admit(survival_BM, budget, planned_B, options: PlanOptions):
    """Draft rows `[B]` that a budget buys for each request.

    Args:
      survival_BM: current survival, not rising along a request.
      budget: K, the most draft rows of all planned requests together.
      planned_B: requests the budget is for; others get none.
      options: clamps and `survival_eps`.

    Returns:
      Counts from `min - 1` to `max - 1` that sum to at most K. The minimum is
      paid first; it holds if K covers it, which the host sees to.
    """
    bind(survival_BM=survival_BM, planned_B=planned_B)
    num_draft = survival_BM.shape[1]
    least, most = options.bounds(num_draft + 1)
    position_M = jnp.arange(num_draft)
    is_due_BM = (position_M < least - 1)[None] & planned_B[:, None]
    is_open_BM = (survival_BM > options.survival_eps) & planned_B[:, None]
    is_open_BM &= (position_M < most - 1)[None]
    key_BM = jnp.where(is_due_BM, 2.0, jnp.where(is_open_BM, survival_BM, -1.0))
    admitted_BM = (rank(key_BM) < budget) & (is_due_BM | is_open_BM)
    return admitted_BM.sum(1, dtype=jnp.int32)


def planned_window(
    slots: Slots, survival_BM, budget, options: PlanOptions, rows: int | None = None
):
    """`verify_len_B` under a budget, anchor included; 0 for an idle slot.

    Args:
      slots: a request with speculation off gets its anchor, one with a window of
        its own gets that window; neither draws on the budget.
      survival_BM: current survival.
      budget: K, scalar int32 (traced).
      options: clamps.
      rows: T, where the rows must fit; None: no bound.
    """
    own_B = own_rows(slots, survival_BM.shape[1] + 1)
    planned_B = slots.active_B & (own_B == 0)
    fixed_B = jnp.maximum(own_B, 1) * slots.active_B
    if rows is not None:
        budget = jnp.minimum(budget, rows - fixed_B.sum())
    granted_B = admit(survival_BM, budget, planned_B, options)
    return (fixed_B + granted_B).astype(jnp.int32)


@struct.dataclass
class Seen:
    """What a plan read, for the host to plan later rounds with.

    Attributes:
      survival_BM: current survival; None in `static` mode.
      logit_BM: raw confidence, where `collect` asks for it.
    """

    survival_BM: jnp.ndarray | None = None  # [B, M]
    logit_BM: jnp.ndarray | None = None  # [B, M]


def windows(
    slots: Slots,
    proposal: Proposal,
    options: PlanOptions,
    budget=None,
    rows: int | None = None,
):
    """`(verify_len_B, Seen)` of a round.

    Args:
      slots: the requests.
      proposal: their drafts; without any, each request gets its anchor.
      options: the mode and its clamps.
      budget: K; a planned mode needs it.
      rows: T of a packed round.

    Raises:
      UserError: a planned mode for drafts without a confidence.
    """
    if proposal.tokens_BM.shape[1] == 0:
        return static_window(slots, proposal), Seen()
    if not options.is_planned:
        logit_BM = confidence_logit(proposal) if options.collect else None
        return static_window(slots, proposal), Seen(logit_BM=logit_BM)
    if budget is None:
        raise ValueError(f"budget must be given: mode={options.mode!r} needs K")
    logit_BM = confidence_logit(proposal)
    survival_BM = survival(logit_BM, options.temperatures, slots.sts_BM)
    verify_len_B = planned_window(slots, survival_BM, budget, options, rows)
    kept = logit_BM if options.collect else None
    return verify_len_B, Seen(survival_BM=survival_BM, logit_BM=kept)
