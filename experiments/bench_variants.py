"""One exported drafter, served in several ways: accept lengths side by side.

    as_is      drafts drawn from q, features as the target computes them
    one_hot    the likeliest drafts, q one-hot, whatever the temperature
    <dtype>    features rounded to a smaller type before the drafter reads them
    without_<option>, with_<option>
               a part that can be left out (DFlash 2's selector); `as_is` is the other

All of them verify alike, so each one's greedy text must be the plain one: that is
compared. Nothing is timed.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import rich.console
import rich.markup
import rich.table

from experiments import bench_decode, feature_rounding, optional_part, serving
from experiments.progress import say
from spec_jax.config import schema
from spec_jax.data import prompts as prompt_files
from spec_jax.decode.engine import Engine
from spec_jax.decode.request import Settings
from spec_jax.drafters.base import Drafter
from spec_jax.evals import comparison, decoding
from spec_jax.target.loading import Target

AS_IS, ONE_HOT = "as_is", "one_hot"
GREEDY = "t0"


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to serve.

    Attributes:
      drafter: what drafts; all variants have the same weights.
      one_hot: `serve.one_hot_draft`.
      features: dtype that the drafter reads features in; "" where it reads none.
    """

    drafter: Drafter
    one_hot: bool = False
    features: str = ""


def variants(
    cfg: schema.BenchVariants, drafter: Drafter, target: Target, dtype: str
) -> tuple[dict[str, Variant], list[str]]:
    """The variants that a drafter has, by name, and sentences on those it has not.

    Args:
      cfg: the recipe.
      drafter: from its folder.
      target: what it drafts for.
      dtype: of the features that the target computes.

    Raises:
      UserError: an unknown type of features.
    """
    reads = feature_rounding.reads_features(drafter)
    as_is = Variant(drafter, features=dtype if reads else "")
    found, absent = {AS_IS: as_is}, []
    found[ONE_HOT] = dataclasses.replace(as_is, one_hot=True)
    for kind in cfg.roundings:
        rounded = feature_rounding.with_rounded_features(drafter, kind)
        if reads:
            found[kind] = Variant(rounded, features=kind)
    if cfg.roundings and not reads:
        absent.append(f"drafter {drafter.name!r} reads no features to round")
    other = optional_part.other_of(drafter, target.spec)
    if other is None:
        absent.append(f"drafter {drafter.name!r} has no part to leave out")
    else:
        on = optional_part.drafts_with_part(other)
        name = f"{'with' if on else 'without'}_{drafter.optional_part}"
        found[name] = dataclasses.replace(as_is, drafter=other)
    return found, absent


def serve_set(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
    settings: Settings,
) -> dict[str, Any]:
    """Figures of one variant, prompt set and temperature; looping texts stand apart.

    Args:
      engine: of the variant, with one slot.
      prompts: token ids.
      plain: what plain decoding answers greedily.
      settings: of every request; greedy ones are compared with `plain`.
    """
    made = [decoding.decode_one(engine, prompt, settings) for prompt in prompts]
    kept = [d.generation for d in made if not d.looping]
    apart = [d.generation for d in made if d.looping]
    found = {
        "prompts": len(made),
        "looping_prompts": len(apart),
        "accept_length": decoding.accept_length(kept),
        "accept_length_looping": decoding.accept_length(apart),
        "accept_by_position": decoding.accept_by_position(kept, engine.window - 1),
    }
    tokens = [d.generation.tokens for d in made]
    return found | comparison.greedy_identity(engine, prompts, plain, tokens, settings)


def main(cfg: schema.BenchVariants, workdir: pathlib.Path) -> dict[str, Any]:
    """Serves every variant over every set and temperature, and prints the table."""
    del workdir  # nothing is kept but the report
    named, absent = bench_decode.prompt_sets(cfg.bench)
    target, params = serving.load_serving_target(cfg.target)
    exported = serving.load_drafter(cfg.drafter, target, num_draft=cfg.serve.num_draft)
    dtype = params["params"]["embed"].dtype.name
    found, sentences = variants(cfg, exported.drafter, target, dtype)
    for sentence in sentences:
        say(f"left out: {sentence}")
    serve = serving.one_by_one(cfg.serve)
    settings = {
        kind_of(t): serving.settings_from(
            serve, temperature=t, max_new_tokens=cfg.bench.max_new_tokens
        )
        for t in (0.0, *cfg.temperatures)
    }
    _, weights, frozen = serving.unpack(exported, params)

    def engine_of(variant: Variant) -> Engine:
        return serving.make_engine(
            target,
            params,
            dataclasses.replace(serve, one_hot_draft=variant.one_hot),
            (variant.drafter, weights, frozen),
            plain=False,
        )

    first = engine_of(found[AS_IS])
    sets = {
        which: [
            prompt_files.render_prompt(
                target,
                prompt,
                mask_id=serving.mask_id_of(exported.drafter),
                context=first.room - cfg.bench.max_new_tokens,
            )
            for prompt in prompts
        ]
        for which, prompts in named.items()
    }
    say("plain")
    decoder = serving.make_engine(target, params, serve)
    plain = {
        which: [g.tokens for g in decoder.generate(ids, settings[GREEDY])]
        for which, ids in sets.items()
    }
    figures: dict[str, Any] = {}
    for name, variant in found.items():
        engine = first if name == AS_IS else engine_of(variant)
        figures[name] = {}
        for which, ids in sets.items():
            figures[name][which] = {}
            for kind in map(kind_of, cfg.temperatures):
                say(f"{name}, {which}, {kind}")
                figures[name][which][kind] = serve_set(
                    engine, ids, plain[which], settings[kind]
                )
    trained_on = exported.contract.feature_dtype
    metrics: dict[str, Any] = {
        "weights_sha256": exported.weights_sha256,
        "features_trained_on": trained_on,
        "variants": figures,
        "features": {name: variant.features for name, variant in found.items()},
    }
    if 0.0 in cfg.temperatures:
        metrics["greedy_identical"] = all(
            kinds[GREEDY]["greedy_identical"]
            for sets_of in figures.values()
            for kinds in sets_of.values()
        )
    left = [*absent, *sentences]
    if left:
        metrics["left_out"] = "; ".join(left)
    print_table(found, figures, trained_on)
    which, kind = next(iter(sets)), kind_of(cfg.temperatures[0])
    acceptance = {n: f[which][kind]["accept_by_position"] for n, f in figures.items()}
    return metrics | {"series": {"acceptance": acceptance}}


def kind_of(temperature: float) -> str:
    """How a report names a temperature."""
    return f"t{temperature:g}"


def print_table(
    found: dict[str, Variant], figures: dict[str, Any], trained_on: str
) -> None:
    """Accept length of every variant, set and temperature, and whose features it read.

    Args:
      found: the variants, by name.
      figures: by variant, set and temperature.
      trained_on: the contract's `feature_dtype`.
    """
    table = rich.table.Table(
        "variant", "features", title=f"accept length; trained on {trained_on} features"
    )
    columns = [(s, k) for s, kinds in figures[AS_IS].items() for k in kinds]
    for which, kind in columns:
        table.add_column(rich.markup.escape(f"{which}, {kind}"), justify="right")
    for name, variant in found.items():
        lengths = [figures[name][s][k]["accept_length"] for s, k in columns]
        table.add_row(
            name,
            variant.features or "-",
            *("-" if length is None else f"{length:.2f}" for length in lengths),
        )
    rich.console.Console().print(table)
