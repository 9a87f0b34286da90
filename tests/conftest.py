"""Settings and fixtures that all tests share."""

import gc
import os
import pathlib

# Before jax is imported anywhere: tests run on the CPU unless told otherwise.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests compile more than they run: LLVM optimises nothing for them, and what one of
# them compiled, another process, a subprocess or the next run reads.
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(pathlib.Path(__file__).parents[1] / ".pytest_cache" / "xla"),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

import jax
import pytest

# Linux lets a process map 65,530 pieces of memory, every compiled program takes some,
# and the one too many ends the process without a word.
MOST_MAPPED = 16_000


def num_mapped() -> int:
    """Pieces of memory that this process has mapped; 0 where no system says."""
    try:
        return pathlib.Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return 0


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """After a file's tests, programs that nothing holds are given back."""
    yield
    if num_mapped() > MOST_MAPPED:
        jax.clear_caches()
        gc.collect()


def pytest_addoption(parser):
    parser.addoption(
        "--drafter",
        action="append",
        default=[],
        metavar="PATH",
        help="dotted path of a drafter elsewhere: tests/drafters/test_conformance.py "
        "then checks those that are named, and no other",
    )


@pytest.fixture(scope="session")
def smollm2():
    """The real target, loaded once (its converted weights are cached on disk)."""
    from spec_jax.target.loading import load_target

    return load_target("smollm2-135m-instruct")
