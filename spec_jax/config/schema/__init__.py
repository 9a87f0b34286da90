"""What a recipe may say: frozen sections, checked when they are made.

A recipe file builds a ConfigDict; `loading.to_recipe` turns it into one of the
classes of `SCHEMAS` once, at the entry point. Every section is frozen and
hashable, so it may be a static jit argument, and its defaults live here alone.
Options that belong to a higher floor (a drafter's, an objective's) travel as
sorted `(name, value)` pairs and become that floor's own record through
`loading.to_dataclass`.

Lengths are in tokens, counts in items, probabilities and shares in [0, 1].
"""

from __future__ import annotations

from spec_jax.config.schema.bench import (
    Bench,
    BenchDecode,
    BenchFamily,
    BenchLaw,
    BenchPeers,
    BenchRound,
    BenchSchedule,
    BenchSoak,
    BenchTree,
    BenchVariants,
)
from spec_jax.config.schema.checks import DTYPES, Pairs
from spec_jax.config.schema.data import Capture, Data
from spec_jax.config.schema.recipes import Common, Generate, Pipeline, Synthesise, Why
from spec_jax.config.schema.runtime import Calibrate, Profile, ServeOffline
from spec_jax.config.schema.serving import AutoOff, Plan, Serve
from spec_jax.config.schema.target import Target, TinyTarget
from spec_jax.config.schema.training import Drafter, Export, Train

__all__ = (
    "DTYPES",
    "SCHEMAS",
    "AutoOff",
    "Bench",
    "BenchDecode",
    "BenchFamily",
    "BenchLaw",
    "BenchPeers",
    "BenchRound",
    "BenchSchedule",
    "BenchSoak",
    "BenchTree",
    "BenchVariants",
    "Calibrate",
    "Capture",
    "Common",
    "Data",
    "Drafter",
    "Export",
    "Generate",
    "Pairs",
    "Pipeline",
    "Plan",
    "Profile",
    "Serve",
    "ServeOffline",
    "Synthesise",
    "Target",
    "TinyTarget",
    "Train",
    "Why",
)

SCHEMAS: dict[str, type[Common]] = {
    "pipeline": Pipeline,
    "synthesise": Synthesise,
    "generate": Generate,
    "bench_round": BenchRound,
    "bench_decode": BenchDecode,
    "bench_peers": BenchPeers,
    "calibrate": Calibrate,
    "profile": Profile,
    "serve_offline": ServeOffline,
    "bench_family": BenchFamily,
    "bench_tree": BenchTree,
    "bench_variants": BenchVariants,
    "why": Why,
    "bench_law": BenchLaw,
    "bench_soak": BenchSoak,
    "bench_schedule": BenchSchedule,
}
