"""How tokens are decoded."""

from __future__ import annotations

import dataclasses

from spec_jax.config.schema.checks import (
    ascending,
    at_least,
    check,
    one_of,
    share,
    temperature,
    top_p,
)


@dataclasses.dataclass(frozen=True)
class Serve:
    """How tokens are decoded.

    Attributes:
      slots: B, requests decoded together.
      max_context: A, tokens a slot may hold.
      prefill_buckets: lengths a prompt chunk is padded to; () is powers of two.
      num_draft: M, drafts of a round; 0 is what the drafter was trained for.
      speculate: False decodes plainly.
      topology: "chain", "static_tree" or "dynamic_tree", where the drafter can.
      tree_depth: levels of a dynamic tree, and of the default static one.
      tree_top_k: children of an expanded node, and nodes expanded per level.
      tree_nodes: drafts of a dynamic tree that are verified.
      tree_parents: of a static tree, each draft row's parent row (0: the root);
        () is a tree of 25 drafts in five levels, cut to `tree_depth`.
      one_hot_draft: at temperature > 0, draft the likeliest token (q one-hot)
        instead of sampling q.
      temperature: 0 is greedy.
      top_k: 0 keeps all.
      top_p: 1.0 keeps all.
      min_p: 0.0 keeps all.
      max_new_tokens: longest answer.
    """

    slots: int = 4
    max_context: int = 512
    prefill_buckets: tuple[int, ...] = ()
    num_draft: int = 0
    speculate: bool = True
    topology: str = "chain"
    tree_depth: int = 5
    tree_top_k: int = 4
    tree_nodes: int = 15
    tree_parents: tuple[int, ...] = ()
    one_hot_draft: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 128

    def __post_init__(self):
        at_least(1, "serve", self, "slots", "max_new_tokens")
        at_least(2, "serve", self, "max_context")
        at_least(0, "serve", self, "num_draft", "top_k")
        temperature("serve", self, "temperature")
        top_p("serve", self, "top_p")
        share("serve", self, "min_p")
        ascending("serve", self, "prefill_buckets")
        check(
            not self.prefill_buckets or self.prefill_buckets[-1] <= self.max_context,
            "serve.prefill_buckets",
            self.prefill_buckets,
            f"must end at or below serve.max_context={self.max_context}",
        )
        check(
            self.max_new_tokens < self.max_context,
            "serve.max_new_tokens",
            self.max_new_tokens,
            f"must be less than serve.max_context={self.max_context}",
        )

    @property
    def prefill_ladder(self) -> tuple[int, ...]:
        """The prefill buckets, derived where none were named (longest 256)."""
        return self.prefill_buckets or _powers(32, min(256, self.max_context))


@dataclasses.dataclass(frozen=True)
class AutoOff:
    """When speculation switches itself off for a request; see `decode.auto_off`.

    Attributes:
      min_accept_length: tokens per round below which a request goes on plainly;
        0 is never.
      rounds: rounds with drafts over which that is averaged.
      max_active: requests above which all of them decode plainly; -1 is never.
      max_context: tokens of prompt and answer above which a request goes on
        plainly; -1 is never.
    """

    min_accept_length: float = 0.0
    rounds: int = 16
    max_active: int = -1
    max_context: int = -1

    def __post_init__(self):
        at_least(0, "auto_off", self, "min_accept_length")
        at_least(1, "auto_off", self, "rounds")
        at_least(-1, "auto_off", self, "max_active", "max_context")

    @property
    def used(self) -> bool:
        """Any of the limits is set."""
        return (
            bool(self.min_accept_length) or max(self.max_active, self.max_context) > -1
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a budget is made and shared; see `decode.plan` and `decode.budget`.

    Attributes:
      survival_eps: a draft that is reached with no more than this is not run.
      min_verify_len: rows every planned request gets, its anchor included.
      max_verify_len: rows no planned request exceeds; 0 is the window.
      align_rows: raise the budget until the chosen program's rows are full.
      lag: rounds between a confidence and the budget made from it.
      extra_lag: more of them.
      probe_every: rounds without drafts after which drafting is tried again, at
        the earliest.
      probe_share: most of the plain time that trying again may cost; 0 leaves it to
        `probe_every`.
      newcomers: what a request without a history counts: "optimistic", survival 1,
        or "mean", what the others had on average.
      feedback: scale promised acceptance by what earlier rounds kept of it.
    """

    survival_eps: float = 1e-6
    min_verify_len: int = 1
    max_verify_len: int = 0
    align_rows: bool = False
    lag: int = 2
    extra_lag: int = 0
    probe_every: int = 64
    probe_share: float = 0.0
    newcomers: str = "optimistic"
    feedback: bool = False

    def __post_init__(self):
        one_of("plan", self, "newcomers", ("optimistic", "mean"))
        check(
            0 <= self.survival_eps < 1,
            "plan.survival_eps",
            self.survival_eps,
            "must lie in [0, 1)",
        )
        at_least(1, "plan", self, "min_verify_len", "lag", "probe_every")
        at_least(0, "plan", self, "max_verify_len", "extra_lag")
        share("plan", self, "probe_share")
        check(
            not self.max_verify_len or self.max_verify_len >= self.min_verify_len,
            "plan.max_verify_len",
            self.max_verify_len,
            f"is below plan.min_verify_len={self.min_verify_len}; 0 is the window",
        )

    def changed(self, *names: str) -> str:
        """The first of these fields that is not its default, or ""."""
        default = Plan()
        return next((n for n in names if getattr(self, n) != getattr(default, n)), "")


def _powers(first: int, last: int) -> tuple[int, ...]:
    """Doubling from `first`, below `last`; then `last` itself."""
    ladder = []
    while first < last:
        ladder.append(first)
        first *= 2
    return (*ladder, last)


def needs_drafts(serve: Serve) -> None:
    """What measures or plans drafts serves chains of them."""
    check(
        serve.speculate,
        "serve.speculate",
        serve.speculate,
        "drafts nothing, and rounds that draft are what is measured; leave it out",
    )
    check(
        serve.topology == "chain",
        "serve.topology",
        serve.topology,
        "must be 'chain': trees have no confidence to plan with",
    )
