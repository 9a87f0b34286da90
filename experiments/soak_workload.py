"""What is soaked: two engines, and requests that differ in everything."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from experiments import bench_round, random_target, runtime, serving
from experiments.closed_loop import Job
from spec_jax.config import schema
from spec_jax.core.calibration import AdditiveCost, CostTable
from spec_jax.core.verify_layout import Ladder, even_ladder
from spec_jax.decode import plan
from spec_jax.decode.auto_off import AutoOff
from spec_jax.decode.budget import BudgetOptions
from spec_jax.decode.engine import Engine
from spec_jax.decode.forward import Weights
from spec_jax.decode.options import EngineOptions
from spec_jax.decode.plan import PlanOptions
from spec_jax.decode.request import Settings
from spec_jax.decode.step import RoundOptions
from spec_jax.drafters import base
from spec_jax.target import tokenizer as tokenizers
from spec_jax.target.tokenizer import Tokenizer

VOCAB, EOS, NUM_DRAFT = 64, 3, 4
LETTERS = "abcdefgh"  # of the random target: a token is two of them
REAL_SLOTS, REAL_DRAFT, REAL_NEW_TOKENS = 4, 3, 16


@dataclasses.dataclass(frozen=True)
class Part:
    """One engine of the soak, and how its requests are made.

    Attributes:
      name: in the report.
      engine: decodes them.
      reference: the same target without a drafter.
      requests: to come, in order.
    """

    name: str
    engine: Engine
    reference: Engine
    requests: list[Job]


def cost_table(ladder: Ladder) -> CostTable:
    """Round times under which every way of planning pays at some time."""
    sizes = tuple(size for size, _ in ladder.buckets)
    rows = (1, ladder.buckets[-1][1][-1])
    alpha = tuple(2e-5 * size for size in sizes)
    cost = AdditiveCost(1e-3, sizes, alpha, rows, (0.0, 2e-5 * rows[1]))
    return CostTable(cost, sizes, tuple(9e-4 + a for a in alpha))


def letters_tokenizer() -> Tokenizer:
    """Two letters a token, nothing between: a stop string may begin inside one."""
    words = [one + other for one in LETTERS for other in LETTERS]
    backend = Backend(models.WordLevel({w: i for i, w in enumerate(words)}))
    backend.decoder = decoders.Fuse()
    return tokenizers.from_json(backend.to_str(), eos=EOS)


def engine_of(
    spec,
    weights,
    drafter,
    serve: schema.Serve,
    ladder,
    tokenizer: Tokenizer | None = None,
    **options,
) -> Engine:
    """A compact engine with its planner, or (without a drafter) a plain one."""
    planned = {}
    if drafter is not None:
        planned = {
            "round": RoundOptions(plan=PlanOptions(mode=plan.COMPACT)),
            "ladder": ladder,
            "cost": cost_table(ladder),
            "budget": BudgetOptions(probe_every=16),
        }
    return Engine(
        spec,
        weights,
        EngineOptions(
            slots=serve.slots,
            max_context=serve.max_context,
            prefill_buckets=serve.prefill_buckets or (16, 48),
            **planned,
            **options,
        ),
        drafter,
        -1 if drafter is None else serving.mask_id_of(drafter),
        tokenizer,
    )


def random_requests(
    rng: random.Random,
    count: int,
    token: Callable[[], int],
    *,
    room: int,
    max_new_tokens: int,
    num_draft: int,
    rules: bool,
) -> list[Job]:
    """Requests that differ in everything; three in four are greedy.

    Args:
      rng: of everything but the tokens.
      count: of requests.
      token: draws one.
      room: tokens of a slot.
      max_new_tokens: longest answer.
      num_draft: longest window of a request's own.
      rules: some have penalties and biases, log-probabilities or stop strings.
    """
    made = []
    for _ in range(count):
        length = min(int(rng.expovariate(1 / 20)) + 1, 64)
        changes: dict[str, Any] = {"max_new_tokens": rng.randint(1, max_new_tokens)}
        if rng.random() < 0.25:
            changes |= {
                "temperature": rng.choice([0.3, 0.7, 1.0, 1.5]),
                "top_k": rng.choice([0, 0, 5, 20]),
                "top_p": rng.choice([1.0, 0.9, 0.6]),
                "min_p": rng.choice([0.0, 0.0, 0.1]),
                "seed": rng.choice([None, rng.randrange(2**31)]),
            }
        if rules and rng.random() < 0.3:
            changes |= {
                "presence_penalty": rng.choice([0.0, 0.8]),
                "frequency_penalty": rng.choice([0.0, 0.4]),
                "repetition_penalty": rng.choice([1.0, 1.3]),
                "logit_bias": ((token(), 2.0),),
                "logprobs": True,
                "top_logprobs": rng.choice([0, 1]),
            }
        if rules and rng.random() < 0.2:
            sizes = (2, 2, 3)  # letters; the odd places are between two tokens
            changes["stop"] = ["".join(rng.choices(LETTERS, k=k)) for k in sizes]
        way = rng.random()
        if way < 0.15:
            changes["speculate"] = False
        elif way < 0.35:
            changes["num_draft"] = rng.randint(0, num_draft)
        if rng.random() < 0.2:
            changes["stop_ids"] = (token(),)
        changes["ignore_eos"] = rng.random() < 0.3
        length = min(length, room - changes["max_new_tokens"])
        prompt = [token() for _ in range(length)]
        made.append(Job(prompt, Settings(**changes)))
    return made


def random_part(cfg: schema.BenchSoak) -> Part:
    """The random target, with a drafter that knows its bigrams."""
    spec = random_target.spec_of(VOCAB, eos_ids=(EOS,))
    params = random_target.params_of(spec, cfg.seed, sharp=3.0)
    drafter, weights = random_target.bigram_dspark(
        spec, params, NUM_DRAFT, cfg.seed, noise=0.5
    )
    serve = cfg.serve
    ladder = even_ladder(
        runtime.slot_buckets(serve.slots), NUM_DRAFT + 1, cfg.row_buckets
    )
    text = letters_tokenizer()
    engine = engine_of(
        spec,
        weights,
        drafter,
        serve,
        ladder,
        text,
        penalties=True,
        logprobs=1,
        auto_off=AutoOff(
            min_accept_length=1.2,
            rounds=6,
            max_active=max(serve.slots - 1, 1),
            max_context=60,
        ),
    )
    reference = engine_of(
        spec, Weights(params), None, serve, None, text, penalties=True
    )
    rng = random.Random(cfg.seed)
    requests = random_requests(
        rng,
        cfg.requests,
        lambda: rng.randrange(VOCAB - 1),  # the last one is the drafter's mask
        room=engine.room,
        max_new_tokens=serve.max_new_tokens,
        num_draft=NUM_DRAFT,
        rules=True,
    )
    return Part("random", engine, reference, requests)


def real_part(cfg: schema.BenchSoak) -> Part:
    """The recipe's target, with its drafter or one of random weights.

    Raises:
      UserError: no such target or drafter, or they do not fit.
    """
    target, params = serving.load_serving_target(cfg.target)
    if cfg.drafter:
        exported = serving.load_drafter(
            cfg.drafter, target, num_draft=cfg.serve.num_draft
        )
        drafter, draft, frozen = serving.unpack(exported, params)
        weights = Weights(params, draft, frozen)
    else:
        options = {"num_layers": 1, "num_draft": cfg.serve.num_draft or REAL_DRAFT}
        options["mask_id"] = 16 if target.spec.vocab_size > 16 else 0
        drafter = base.load("dflash", options, target.spec)
        weights = bench_round.random_weights(cfg, target, params, drafter, 0)
    slots = min(cfg.serve.slots, REAL_SLOTS)
    serve = dataclasses.replace(cfg.serve, slots=slots)
    num_draft, mask_id = drafter.layout.num_draft, serving.mask_id_of(drafter)
    rows = min(cfg.row_buckets, 2)
    ladder = even_ladder(runtime.slot_buckets(slots), num_draft + 1, rows)
    engine = engine_of(target.spec, weights, drafter, serve, ladder)
    reference = engine_of(target.spec, Weights(params), None, serve, None)
    rng = random.Random(cfg.seed + 1)

    def token() -> int:
        found = rng.randrange(target.spec.vocab_size)
        return found if found != mask_id else found + 1

    requests = random_requests(
        rng,
        cfg.real_requests,
        token,
        room=engine.room,
        max_new_tokens=min(serve.max_new_tokens, REAL_NEW_TOKENS),
        num_draft=num_draft,
        rules=False,
    )
    return Part("real", engine, reference, requests)
