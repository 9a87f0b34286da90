"""A run's folder: whose it is, who is in it, and the report at its end.

`runs/<recipe>-<hash8>/` belongs to one resolved configuration (`recipe.json`),
is worked in by one process at a time (`.lock`, which the system drops with its
process) and is done when `report.json` is there.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax
import rich.console
import rich.markup
import rich.table
import rich.text

from configs import common
from experiments import clock
from spec_jax.config import loading
from spec_jax.core.errors import UserError
from spec_jax.evals import machine, report
from spec_jax.target.loading import default_cache_dir

ROOT = pathlib.Path(__file__).resolve().parent.parent
CLAIM, LOCK = "recipe.json", ".lock"
WALL = "wall"  # the clock's part that is the whole run

# Tasks that talk to a person, anew each time; their result is the exit code.
TALKS = ("generate", "why")
# What these make lies in their folder and stays true; every other task measures, or
# reads files that may have changed since.
MAKES = ("pipeline", "synthesise")


def prepare_jax(precision: str) -> None:
    """Persists compiled programs and sets the precision of matrix products.

    `JAX_COMPILATION_CACHE_DIR` moves the cache; without it the programs lie
    beside the converted targets.
    """
    if not jax.config.jax_compilation_cache_dir:
        folder = os.path.join(default_cache_dir(), "programs")
        jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_default_matmul_precision", precision)


def default_workdir(recipe: str, cfg: Any) -> pathlib.Path:
    """`runs/<recipe>-<hash8>`, below the folder the command was given in."""
    return pathlib.Path("runs") / f"{recipe}-{loading.config_hash(cfg)[:8]}"


@contextlib.contextmanager
def hold(workdir: pathlib.Path, cfg: Any) -> Iterator[None]:
    """Makes the folder this process's own until the end of the block.

    A folder that this call made and in which nothing was done is taken away
    again when the input turns out to be wrong.

    Raises:
      UserError: another process works there, or another configuration owns it.
    """
    made = not workdir.exists()
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        lock = open(workdir / LOCK, "a+")  # noqa: SIM115
    except OSError as error:
        raise UserError(
            f"workdir={str(workdir)!r} cannot be written ({error.strerror}); name "
            "another with --workdir="
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            raise UserError(
                f"workdir={str(workdir)!r} is in use by process "
                f"{lock.read().strip() or 'unknown'}; wait for it, or name another "
                "with --workdir="
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        try:
            _claim(workdir, cfg)
            yield
        except UserError:
            ours = (CLAIM, LOCK, clock.NAME)
            if made and {p.name for p in workdir.iterdir()} <= set(ours):
                for name in ours:
                    (workdir / name).unlink(missing_ok=True)
                workdir.rmdir()
            raise


def _claim(workdir: pathlib.Path, cfg: Any) -> None:
    mine = loading.config_hash(cfg)
    path = workdir / CLAIM
    if path.exists():
        try:
            owner = str(json.loads(path.read_text())["config_hash"])
        except (ValueError, KeyError, TypeError):
            owner = ""
        if owner != mine:
            named = owner[:8] or f"its {CLAIM} cannot be read"
            raise UserError(
                f"workdir={str(workdir)!r} belongs to another configuration "
                f"({named}, this is {mine[:8]}); name another with --workdir=, or "
                "remove that folder"
            )
        return
    owned = {"config_hash": mine, "config": loading.plain(cfg)}
    report.write_atomically(path, json.dumps(owned, indent=1) + "\n")


def run_task(
    task: ModuleType, cfg: Any, recipe: str, workdir: pathlib.Path
) -> dict[str, Any]:
    """Runs `task.main` in the folder and reports; a finished run only says so.

    What measures does so again each time. `main(cfg, workdir)` returns metrics; its
    key "series" holds what the report draws. `wall_s` adds up all the processes
    that the run took; a measurement's begins anew after its report.
    """
    console = rich.console.Console()
    with hold(workdir, cfg):
        done = report.read_report(workdir)
        measures = cfg.task not in MAKES
        if done and not measures:
            report.print_report(done, console)
            console.print(
                f"all is done since {done['finished']}: {workdir / report.HTML_NAME}",
                soft_wrap=True,
                highlight=False,
                markup=False,
            )
            return done
        seconds = clock.Clock(workdir / clock.NAME)
        with seconds.running(WALL) as wall:
            meter, started = machine.LoadMeter(), time.time()
            metrics = dict(task.main(cfg, workdir))
            series, load = metrics.pop("series", {}), meter.read()
            metrics.setdefault("wall_s", round(wall(), 1))
        written = report.write_report(
            workdir,
            recipe,
            loading.config_hash(cfg),
            metrics,
            series,
            config=loading.plain(cfg),
            changes=loading.changes(cfg, common.base_of(cfg)),
            load=load,
            max_load=cfg.max_load,
            started=started,
            root=ROOT,
        )
        if measures:
            seconds.forget(WALL)
        report.print_report(written, console)
        console.print(
            f"report: {workdir / report.HTML_NAME}",
            soft_wrap=True,
            highlight=False,
            markup=False,
        )
        return written


def print_plan(plan: dict[str, dict[str, Any]]) -> None:
    """Tables of what a run would do."""
    console = rich.console.Console()
    for title, rows in plan.items():
        shown = rich.markup.escape(title)
        table = rich.table.Table(title=shown, title_justify="left", show_header=False)
        for name, value in rows.items():
            cells = str(name), report.format_value(value)
            table.add_row(*map(rich.text.Text, cells))
        console.print(table)
