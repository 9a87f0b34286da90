"""What the runtime's tasks share: files, programs, and what both must agree on."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from experiments import progress, serving, session
from spec_jax.config import schema
from spec_jax.core import calibration
from spec_jax.core.calibration import STS, CostTable
from spec_jax.core.errors import UserError
from spec_jax.core.verify_layout import Ladder, even_ladder, full_ladder
from spec_jax.data.files import write_atomically
from spec_jax.decode.budget import BudgetOptions
from spec_jax.decode.engine import Engine
from spec_jax.decode.plan import STATIC, PlanOptions
from spec_jax.decode.regimes import regime_of
from spec_jax.decode.request import Settings
from spec_jax.decode.state import RoundResult
from spec_jax.evals import machine
from spec_jax.export.folder import Exported
from spec_jax.target.loading import Target


def find_file(path: str) -> str:
    """The file below the current folder, else one that comes with the project."""
    path = os.path.expanduser(path)
    beside = session.ROOT / path
    return str(beside) if not os.path.exists(path) and beside.is_file() else path


def prompt_sets(bench: schema.Bench) -> dict[str, str]:
    """Name -> path of the prompt sets that have one.

    Raises:
      UserError: none has.
    """
    named = {name: path for name, path in bench.prompt_sets if path}
    if not named:
        raise UserError(
            "bench.prompt_sets names no file; say "
            "--config.bench.prompt_sets.gsm8k=<file.jsonl>"
        )
    return named


def drafter_mark(drafter: Exported) -> str:
    """The hash of a drafter's weights, or of its options where it has none.

    Not of `num_draft`, which may be served shorter and is compared by itself.
    """
    if jax.tree.leaves(drafter.params):
        return drafter.weights_sha256
    options = dataclasses.asdict(drafter.drafter.options)
    options.pop("num_draft", None)
    said = json.dumps([drafter.drafter.name, options], sort_keys=True, default=str)
    return hashlib.sha256(said.encode()).hexdigest()


def facts(target: Target, drafter: Exported | None) -> dict[str, str]:
    """What a measured file must have been measured on."""
    return {
        "model": target.fingerprint,
        "drafter": drafter_mark(drafter) if drafter is not None else "",
        "device": jax.devices()[0].device_kind,
        "processor": machine.processor(),
        "dtype": jax.tree.leaves(target.params["params"]["embed"])[0].dtype.name,
    }


def read_cost(
    path: str,
    known: Mapping[str, str],
    num_draft: int,
    ladder: Ladder,
    *,
    allow_unmarked: bool,
) -> CostTable:
    """A recipe's cost table.

    Args:
      path: its file.
      known: from `facts`.
      num_draft: M.
      ladder: the engine's programs.
      allow_unmarked: accept a table that does not say what it was measured on.

    Raises:
      UserError: it cannot be read, was measured on something else, or ends before
        the largest program.
    """
    table = calibration.read_cost(find_file(path)).check(
        **known,
        num_draft=num_draft,
        ladder=ladder.buckets,
        allow_unmarked=allow_unmarked,
    )
    return table.check_reach(ladder.buckets)


def read_sts(
    paths: str,
    known: Mapping[str, str],
    num_draft: int,
    regimes: Mapping[str, int],
    *,
    allow_unmarked: bool,
) -> list[STS]:
    """A recipe's temperatures: one file, or several of different regimes.

    Args:
      paths: files, separated by commas.
      known: from `facts`.
      num_draft: M.
      regimes: how many of the requests that draft have each.
      allow_unmarked: accept a file that does not say what it was fitted on.

    Raises:
      UserError: one cannot be read, was fitted on something else, or none is of a
        regime that the requests have; or two are of one regime.
    """
    names = [name.strip() for name in paths.split(",") if name.strip()]
    if os.path.exists(find_file(paths)):  # a comma may be part of a name
        names = [paths]
    if not names:
        raise UserError(f"sts={paths!r} names no file; name some, or leave it out")
    files = [calibration.read_sts(find_file(name)) for name in names]
    found = [_regime_of_file(fitted) for fitted in files]
    for index, (name, regime) in enumerate(zip(names, found, strict=True)):
        if len(names) > 1 and not regime:
            raise UserError(
                f"sts={paths!r}: {name} does not say which sampling regime it was "
                "fitted for, which several files must; name it alone, or fit it anew "
                "with configs/calibrate.py"
            )
        if regime in found[:index]:
            raise UserError(
                f"sts={paths!r}: {name} and {names[found.index(regime)]} are both of "
                f"{regime!r}; name one file for each sampling regime"
            )
    # One of them is somebody's; any other was fitted for requests that may come.
    some = any(regime in regimes for regime in found)
    wanted = "; ".join(sorted(regimes)) or None
    for name, fitted, regime in zip(names, files, found, strict=True):
        try:
            fitted.check(
                num_draft,
                **known,
                sampling=regime if some else wanted,
                allow_unmarked=allow_unmarked,
            )
        except UserError as error:
            raise UserError(f"sts={name!r}: {error}") from error
    return files


def slot_buckets(slots: int) -> tuple[int, ...]:
    """R of the programs: doubling from 1, then all slots."""
    powers = [1]
    while powers[-1] < slots:
        powers.append(min(2 * powers[-1], slots))
    return tuple(powers)


def load_planning(
    cfg: schema.ServeOffline,
    target: Target,
    drafter: Exported | None,
    settings: Iterable[Settings],
    say: Callable[[str], None] = progress.say,
) -> dict[str, Any]:
    """What `serving.make_engine` needs to plan as the recipe says.

    Args:
      cfg: the recipe.
      target: the target.
      drafter: its drafter, or None.
      settings: of the requests to come: temperatures are for one regime.
      say: told how many requests have another.

    Raises:
      UserError: a table or temperatures that were made for something else, or a
        clamp beyond the window.
    """
    buckets = slot_buckets(cfg.serve.slots)
    if drafter is None:
        return {"ladder": full_ladder(buckets, 1)}
    num_draft = drafter.drafter.layout.num_draft
    if cfg.mode == STATIC:
        window = serving.topology_of(cfg.serve).window(num_draft)
        return {"ladder": full_ladder(buckets, window)}
    ladder = even_ladder(buckets, num_draft + 1, cfg.row_buckets)
    for name in ("min_verify_len", "max_verify_len"):
        rows = getattr(cfg.plan, name)
        if rows > num_draft + 1:
            raise UserError(
                f"plan.{name}={rows} is more than the {num_draft + 1} rows of this "
                "drafter's window; lower it"
            )
    known = facts(target, drafter)
    temperatures, cost = (), None
    regimes = collections.Counter(
        regime_of(s, one_hot_draft=cfg.serve.one_hot_draft)
        for s in settings
        if s.speculate
    )
    by_regime: tuple = ()
    if cfg.sts:
        files = read_sts(
            cfg.sts, known, num_draft, regimes, allow_unmarked=cfg.allow_unmarked
        )
        temperatures = files[0].temperatures
        if len(files) > 1:
            by_regime = tuple((_regime_of_file(f), f.temperatures) for f in files)
        _say_others("sts", files, regimes, say)
    if cfg.cost:
        cost = read_cost(
            cfg.cost,
            known,
            num_draft,
            ladder,
            allow_unmarked=cfg.allow_unmarked,
        )
        _say_others("cost", [cost], regimes, say)
    return planning(cfg.plan, cfg.mode, temperatures, by_regime) | {
        "ladder": ladder,
        "cost": cost,
    }


def planning(
    plan: schema.Plan,
    mode: str,
    temperatures: Sequence[float],
    by_regime: Sequence[tuple[str, tuple[float, ...]]] = (),
) -> dict[str, Any]:
    """A recipe's `plan` section as the engine's `plan` and `budget` options."""
    return {
        "plan": PlanOptions(
            mode=mode,
            temperatures=tuple(temperatures),
            by_regime=tuple(by_regime),
            survival_eps=plan.survival_eps,
            min_verify_len=plan.min_verify_len,
            max_verify_len=plan.max_verify_len,
        ),
        "budget": BudgetOptions(
            align_rows=plan.align_rows,
            probe_every=plan.probe_every,
            probe_share=plan.probe_share,
            lag=plan.lag,
            extra_lag=plan.extra_lag,
            newcomers=plan.newcomers,
            feedback=plan.feedback,
        ),
    }


def _regime_of_file(fitted: STS | CostTable) -> str:
    return fitted.source.sampling if fitted.source is not None else ""


def _say_others(
    what: str,
    files: Sequence[STS | CostTable],
    regimes: Mapping[str, int],
    say: Callable[[str], None],
) -> None:
    """Any file is lossless: how many requests have no file of theirs is told."""
    mine = [_regime_of_file(fitted) for fitted in files]
    total = sum(regimes.values())
    others = total - sum(regimes.get(regime, 0) for regime in mine)
    if others:
        whose = "the file's" if len(mine) == 1 else "any file's; the first one's holds"
        say(
            f"{what}: {others} of {total} requests that draft have another sampling "
            f"regime than {whose} ({mine[0] or 'unknown'!r}); their texts keep their "
            "law, their budgets are less exact"
        )


def write_rows(path: pathlib.Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """JSON lines; a reader sees all of them or none."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    write_atomically(str(path), text.encode())


def watch(engine: Engine, on_round: Callable[[RoundResult], None]) -> None:
    """Shows every round's result as the host reads it, one round late.

    The results pass the engine's one door (`fetch`) in the order of the rounds.
    """
    fetch = engine.fetch

    def seen(tree):
        result = fetch(tree)
        if isinstance(result, RoundResult):
            on_round(result)
        return result

    engine.fetch = seen  # type: ignore[method-assign]
