"""The way in: a recipe, perhaps some overrides, and the task it names.

    python -m experiments.run [configs/x.py[:arg]] [--config.a.b=value] [options]

    configs/x.py[:arg]     the recipe; configs/quickstart.py without one
    --config.a.b=value     one value of it (--config=configs/x.py names it too)
    --workdir=DIR          where the run works; runs/<recipe>-<hash> without it
    --print_config         print every resolved value and stop
    --plan                 print sizes, bytes and expected time and stop
    --inspect              print a small batch token by token and stop

The same command again resumes, or says that all is done. Exit codes: 0 done,
1 a comparison found a difference (why), 2 wrong input (one sentence says what
and how to mend it), 130 interrupted.
"""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import re
import sys
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_flags

from configs import common
from experiments import session
from spec_jax.config import loading
from spec_jax.config.schema.data import SET_BY_RECIPES
from spec_jax.core.errors import UserError

QUICKSTART = "configs/quickstart.py"


def main(argv: list[str] | None = None) -> int:
    """Runs the command line `argv` (without the program) and returns its code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if {"--help", "-h"} & set(argv):
        print(__doc__)
        return 0
    try:
        return _run(argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command again resumes", file=sys.stderr)
        return 130


def _run(argv: list[str]) -> int:
    options, recipe = parse(argv)
    cfg = loading.to_recipe(options.config)
    check_used(argv, cfg)
    if options.print_config:
        words = loading.describe(cfg, common.base_of(cfg))
        print(f"# {recipe}, hash {loading.config_hash(cfg)}\n{words}")
        return 0
    for name in cfg.imports:
        import_own(name)
    task = importlib.import_module(f"experiments.{cfg.task}")
    session.prepare_jax(cfg.target.precision)
    workdir = pathlib.Path(options.workdir or session.default_workdir(recipe, cfg))
    for name in ("plan", "inspect"):
        if getattr(options, name) and not hasattr(task, name):
            raise UserError(f"--{name} is not for task={cfg.task!r}; leave it out")
    if options.plan:
        session.print_plan(task.plan(cfg, workdir))
    elif options.inspect:
        task.inspect(cfg, workdir)
    elif cfg.task in session.TALKS:
        code = task.main(cfg, workdir)
        return code if isinstance(code, int) else 0
    else:
        session.run_task(task, cfg, recipe, workdir)
    return 0


def check_used(argv: list[str], cfg: Any) -> None:
    """Refuses words that make texts where the texts are made already.

    A recipe may hold such values, whether samples are named or not.

    Raises:
      UserError: one was typed beside `data.samples`.
    """
    samples = getattr(getattr(cfg, "data", None), "samples", "")
    for name in SET_BY_RECIPES if samples else ():
        if any(re.match(rf"--config\.data\.{name}(\W|$)", word) for word in argv):
            raise UserError(
                f"data.{name}={getattr(cfg.data, name)!r} makes texts, and "
                f"data.samples={samples!r} are made already; leave it out"
            )


def import_own(name: str) -> None:
    """Imports a module that the recipe names.

    Raises:
      UserError: there is none, or it does not load.
    """
    try:
        importlib.import_module(name)
    except Exception as error:
        raise UserError(
            f"imports={name!r} cannot be imported ({error}); give the dotted path of a "
            "module that this Python finds"
        ) from error


def parse(argv: list[str]) -> tuple[Any, str]:
    """The flags' values (`.config` is the ConfigDict) and the recipe's name.

    Raises:
      UserError: no such recipe, one that does not load, an unknown key or flag, a
        value of a wrong type.
    """
    path, argv = _take_recipe(argv)
    config = _load(path)
    values = flags.FlagValues()
    try:
        config_flags.DEFINE_config_dict(
            "config",
            config,
            flag_values=values,
            lock_config=True,
            sys_argv=["run", *argv],
        )
        flags.DEFINE_string("workdir", "", "folder of the run", flag_values=values)
        for name in ("print_config", "plan", "inspect"):
            flags.DEFINE_boolean(name, False, name, flag_values=values)
        rest = values(["run", *argv])
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(_sentence(error)) from error
    if rest[1:]:
        raise UserError(f"unexpected argument {rest[1]!r}; the recipe comes first")
    return values, _name(path)


def _take_recipe(argv: list[str]) -> tuple[str, list[str]]:
    """The recipe's path and the words that remain; the last mention counts."""
    path, rest = QUICKSTART, list(argv)
    if rest and not rest[0].startswith("-"):
        path = rest.pop(0)
    while "--config" in rest[:-1]:
        at = rest.index("--config")
        rest[at : at + 2] = [f"--config={rest[at + 1]}"]
    for word in [w for w in rest if w.startswith("--config=")]:
        path = word.removeprefix("--config=")
        rest.remove(word)
    return path, rest


def _load(path: str) -> ml_collections.ConfigDict:
    """What the recipe's `get_config` gives, with its argument where there is one.

    Raises:
      UserError: no such recipe, or it does not load.
    """
    file, *arg = path.split(":", 1)
    found = _find(file)
    spec = importlib.util.spec_from_file_location("recipe", found)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        config = module.get_config(*arg)
        if isinstance(config, ml_collections.ConfigDict):
            return config
        return loading.to_config_dict(config)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"recipe {file} cannot be loaded ({type(error).__name__}: "
            f"{_reason(error)}); mend the file"
        ) from error


def _reason(error: Exception) -> str:
    """What a recipe raised, as one line; a locked section names its fields last."""
    said = error.args[0] if isinstance(error, KeyError) and error.args else error
    text = " ".join(str(said).split())
    key = re.search(r'Key "([^"]*)"', text)
    if key is None:
        return text
    meant = re.search(r'Did you mean "([^"]*)"', text)
    return f"{key[1]!r} is no field" + (
        f", did you mean {meant[1]!r}?" if meant else ""
    )


def _find(file: str) -> pathlib.Path:
    """The recipe's file below the current folder, else beside this package."""
    for folder in (pathlib.Path(), session.ROOT):
        if (folder / file).is_file():
            return folder / file
    known = sorted(
        str(p.relative_to(session.ROOT))
        for p in (session.ROOT / "configs").rglob("*.py")
        if p.name not in ("common.py", "__init__.py")
    )
    raise UserError(f"recipe {file!r} is not there; known recipes: {', '.join(known)}")


def _name(path: str) -> str:
    """`configs/bench/round.py:x` -> `bench-round-x`."""
    file, _, arg = path.partition(":")
    parts = list(pathlib.Path(file).with_suffix("").parts)
    if "configs" in parts:
        parts = parts[len(parts) - parts[::-1].index("configs") :]
    else:
        parts = parts[-1:]
    return re.sub(r"[^A-Za-z0-9_.]+", "-", "-".join([*parts, arg])).strip("-")


def _sentence(error: Exception) -> str:
    """What a flag parser raised, as one line."""
    text = str(error).replace("\\n", "\n").replace("\\'", "'").strip()
    if isinstance(error, (AttributeError, KeyError)):
        key = text.strip("'\"").split("'")[0].split("\n")[0]
        meant = re.search(r'Did you mean "([^"]*)"', text)
        fix = f"did you mean {meant[1]!r}?" if meant else "--print_config lists them"
        return f"{key!r} is not a key of this recipe; {fix}"
    value = re.match(r"flag --config\.([\w.]+)=(.*?): (.*)", text)
    if value:
        return f"{value[1]}={value[2]!r} has the wrong type ({value[3]})"
    return text.split("\n")[-1]


if __name__ == "__main__":
    sys.exit(main())
