"""What a number was measured on: versions, device, revision, other load.

A ratio measured beside a busy neighbour is not a result. `LoadMeter` tells how
much of the machine *other* processes used while this one measured, and the
report turns that into `valid`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib.metadata
import os
import pathlib
import platform
import subprocess
import time

import jax

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def versions() -> dict[str, str]:
    """Python's and the packages' versions; "absent" for what is not installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def device() -> dict[str, str | int | None]:
    """Platform, kind and number of JAX's devices, and the processor beside them."""
    first = jax.devices()[0]
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "count": jax.device_count(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
    }


def processor() -> str:
    """The processor in words: its name and how many cores there are of it."""
    return f"{_cpu_name()}, {os.cpu_count()} cores"


def _cpu_name() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().split("\n")
    except OSError:
        return platform.processor() or platform.machine()
    names = [x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")]
    return names[0] if names else platform.machine()


def revision(root: str | os.PathLike) -> dict[str, str | bool]:
    """Commit of the checkout at `root`, and whether its files differ from it.

    An installed copy without a `.git` folder has no commit: `"unknown"`.
    """
    unknown: dict[str, str | bool] = {"commit": "unknown", "dirty": False}
    if not (pathlib.Path(root) / ".git").exists():
        return unknown
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_git(root, "status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return unknown


def _git(root: str | os.PathLike, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", os.fspath(root), *words],
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    )
    return done.stdout.strip()


@dataclasses.dataclass(frozen=True)
class Load:
    """How busy the machine was.

    Attributes:
      before: one-minute load average over the number of cores, at the start.
      after: the same at the end; it counts this run too.
      others: share of all cores that other processes used in between, or None
        where the system does not tell.
      seconds: length of the measurement.
    """

    before: float
    after: float
    others: float | None
    seconds: float

    def valid(self, bound: float) -> bool:
        """Whether other processes stayed at or below `bound` of the machine.

        Where their share is unknown, the load average before the start decides.
        """
        return (self.before if self.others is None else self.others) <= bound


class LoadMeter:
    """Started when made; `read` tells the load since then."""

    def __init__(self):
        self._before = _load_average()
        self._busy = _machine_cpu_seconds()
        self._own = _own_cpu_seconds()
        self._start = time.perf_counter()

    def read(self) -> Load:
        seconds = time.perf_counter() - self._start
        busy = _machine_cpu_seconds()
        others = None
        if busy is not None and self._busy is not None and seconds > 0:
            foreign = (busy - self._busy) - (_own_cpu_seconds() - self._own)
            others = min(1.0, max(0.0, foreign / seconds / (os.cpu_count() or 1)))
        return Load(self._before, _load_average(), others, seconds)


def _load_average() -> float:
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        return 0.0


def _own_cpu_seconds() -> float:
    """Processor time of this process and of the children it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _machine_cpu_seconds() -> float | None:
    """Busy processor time of the whole machine since it started (Linux)."""
    try:
        fields = pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()
        ticks = [int(x) for x in fields[1:]]
        # user nice system idle iowait irq softirq steal: idle and iowait are not busy.
        busy = sum(ticks[:8]) - ticks[3] - ticks[4]
        return busy / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def resident_mb() -> float:
    """Memory that this process holds, in MiB; 0 where the system does not tell.

    What its heap has freed and the allocator keeps (glibc does, per thread) is given
    back first: it is not held.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        lines = pathlib.Path("/proc/self/status").read_text().split("\n")
    except OSError:
        return 0.0
    found = [x.split()[1] for x in lines if x.startswith("VmRSS:")]
    return int(found[0]) / 1024 if found else 0.0
