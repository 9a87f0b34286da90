"""Temperatures for a drafter's confidence: decode, collect, fit, write.

Rounds run with full windows, so that what is accepted does not depend on what
the confidence was worth. Each round of each request gives one row: the raw
log-odds of its drafts and how many of them were accepted, before any trim.
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments import progress, runtime, serving
from spec_jax.config import schema
from spec_jax.core import calibration
from spec_jax.core.calibration import Source
from spec_jax.core.errors import UserError
from spec_jax.data import prompts as prompt_files
from spec_jax.decode import regimes
from spec_jax.decode.engine import Engine
from spec_jax.decode.options import room_of
from spec_jax.decode.plan import PlanOptions
from spec_jax.decode.request import Settings
from spec_jax.decode.state import RoundResult
from spec_jax.evals import decoding, sts
from spec_jax.evals.ece import NUM_BINS, reliability
from spec_jax.export.folder import Exported
from spec_jax.target.loading import Target

STS_NAME = "sts.json"

_CERTAIN = 100.0  # log-odds that stand for infinite ones


class Rounds:
    """Confidence and acceptance of every verified proposal.

    Attributes:
      dropped: proposals left out because a draft row was not finite.
      empty: proposals left out because nothing was drafted (a lookup that found
        nothing).
    """

    def __init__(self):
        self._logits: list[np.ndarray] = []
        self._accepted: list[np.ndarray] = []
        self.dropped = 0
        self.empty = 0

    def add(self, result: RoundResult) -> None:
        """Books the slots of a round that verified drafts."""
        if result.confidence_logit_BM is None:
            return  # nobody drafted
        logits_BM = np.asarray(result.confidence_logit_BM, np.float64)
        whole_B = np.asarray(result.verify_len_B) == logits_BM.shape[1] + 1
        drafted_B = np.asarray(result.ran_B) & whole_B & ~np.asarray(result.bad_B)
        empty_B = np.isneginf(logits_BM).all(1)
        self.empty += int((drafted_B & empty_B).sum())
        drafted_B &= ~empty_B
        logits_BM = np.clip(logits_BM, -_CERTAIN, _CERTAIN)  # NaN stays
        usable_B = np.isfinite(logits_BM).all(1)
        self.dropped += int((drafted_B & ~usable_B).sum())
        keep_B = drafted_B & usable_B
        self._logits.append(logits_BM[keep_B])
        self._accepted.append(np.asarray(result.raw_accepted_B)[keep_B])

    def arrays(self, num_draft: int) -> tuple[np.ndarray, np.ndarray]:
        """Logits `[N, M]` and the prefix mask `[N, M]`."""
        if not self._logits:
            return np.zeros((0, num_draft)), np.zeros((0, num_draft))
        return (
            np.concatenate(self._logits),
            sts.prefix_mask(np.concatenate(self._accepted), num_draft),
        )


def collecting_engine(
    target: Target, params: Any, serve: schema.Serve, drafter: Exported
) -> Engine:
    """An engine of full windows that tells what its confidence was.

    Raises:
      UserError: the drafter has no confidence, or the allocation is too small.
    """
    return serving.make_engine(
        target,
        params,
        serve,
        drafter,
        chunks_per_tick=serve.slots,
        plain=False,
        plan=PlanOptions(collect=True),
    )


def collect(
    engine: Engine, prompts: list[list[int]], settings: list[Settings]
) -> tuple[Rounds, list]:
    """Decodes the prompts together; what their rounds said, and the answers."""
    rounds = Rounds()
    runtime.watch(engine, rounds.add)
    return rounds, engine.generate(prompts, settings)


def survivals(logits_NM, mask_NM, num_bins: int = NUM_BINS) -> dict[str, np.ndarray]:
    """Survival `[N, M]` by the confidence as it is, and calibrated.

    The calibrated one is of rounds that were not fitted (`sts.held_out_survival`).
    """
    return {
        "raw": sts.survival(logits_NM, np.ones(logits_NM.shape[1])),
        "calibrated": sts.held_out_survival(logits_NM, mask_NM, num_bins),
    }


def reliabilities(
    survival: Mapping[str, np.ndarray], mask_NM: np.ndarray, num_bins: int = NUM_BINS
) -> dict[str, list]:
    """The reliability diagram's points for each kind of survival."""
    return {
        name: reliability(values_NM.ravel(), mask_NM.ravel(), num_bins)
        for name, values_NM in survival.items()
    }


def main(cfg: schema.Calibrate, workdir: pathlib.Path) -> dict[str, Any]:
    """Writes `sts.json` into the workdir; returns the report's metrics.

    Raises:
      UserError: no such drafter or prompts, a drafter without confidence, or too
        few rounds.
    """
    prompts = read_prompts(cfg)
    target, params = serving.load_serving_target(cfg.target)
    exported = serving.load_drafter(cfg.drafter, target, num_draft=cfg.serve.num_draft)
    layout = exported.drafter.layout
    room = room_of(cfg.serve.max_context, layout.window, target.spec)
    limit = room - cfg.serve.max_new_tokens
    mask_id = serving.mask_id_of(exported.drafter)
    ids = [prompt_files.render_prompt(target, p, mask_id=mask_id) for p in prompts]
    fitting = [i for i in ids if len(i) <= limit]
    if not fitting:
        raise UserError(
            f"prompts={cfg.prompts!r}: none fits into the {limit} tokens that "
            "serve.max_context leaves beside serve.max_new_tokens; raise it"
        )
    engine = collecting_engine(target, params, cfg.serve, exported)
    settings = [
        serving.settings_from(cfg.serve, seed=(cfg.seed + n) % 2**31)
        for n in range(len(fitting))
    ]
    progress.say(f"calibrate: {len(fitting)} prompts, {cfg.serve.slots} at a time")
    start = time.perf_counter()
    rounds, answers = collect(engine, fitting, settings)
    seconds = time.perf_counter() - start
    num_draft = layout.num_draft
    logits_NM, mask_NM = rounds.arrays(num_draft)
    if len(logits_NM) < cfg.min_rounds:
        raise UserError(
            f"min_rounds={cfg.min_rounds}: the prompts gave {len(logits_NM)} rounds; "
            "name more prompts, or raise serve.max_new_tokens"
        )
    regime = regimes.regime_of(cfg.serve)
    found = sts.fit(
        logits_NM,
        mask_NM,
        dataset=cfg.dataset or f"{regime}; {pathlib.Path(cfg.prompts).name}",
        source=Source(
            **runtime.facts(target, exported), sampling=regime, num_draft=num_draft
        ),
        num_bins=cfg.num_bins,
    )
    calibration.write(found, str(workdir / STS_NAME))
    survival = survivals(logits_NM, mask_NM, cfg.num_bins)
    reached_M = mask_NM.mean(0)
    return {
        "num_samples": found.num_samples,
        "sampling": regime,
        "dataset": found.dataset,
        "mean_ece_before": float(np.mean(found.ece_before)),
        "mean_ece_after": float(np.mean(found.ece_after)),
        "ece_after_of": "rounds that were not fitted: each half under the other's",
        "accept_length": decoding.accept_length(answers),
        "prompts": len(fitting),
        "prompts_left_out": len(ids) - len(fitting),
        "rounds_dropped": rounds.dropped,
        "rounds_without_drafts": rounds.empty,
        "decode_seconds": seconds,
        "temperatures": list(found.temperatures),
        "ece_before": list(found.ece_before),
        "ece_after": list(found.ece_after),
        "survival_measured": reached_M.tolist(),
        "survival_before": survival["raw"].mean(0).tolist(),
        "survival_after": survival["calibrated"].mean(0).tolist(),
        "series": {
            "acceptance": {
                "measured": reached_M.tolist(),
                **{
                    f"confidence, {name}": values_NM.mean(0).tolist()
                    for name, values_NM in survival.items()
                },
            },
            "reliability": reliabilities(survival, mask_NM, cfg.num_bins),
        },
    }


def read_prompts(cfg: schema.Calibrate) -> list[prompt_files.Prompt]:
    """The recipe's prompts."""
    limit = cfg.max_prompts or None
    return prompt_files.named_prompts(runtime.find_file(cfg.prompts), limit)
