"""Folders of drafters without a public form: lookup, and drafters elsewhere.

No other engine reads these. Names are the paths in the tree, options stand in
`config.json` as they are, and a drafter without parameters has an empty weight
file.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Mapping
from typing import Any

from spec_jax.config import loading
from spec_jax.core.errors import UserError
from spec_jax.drafters.base import Drafter
from spec_jax.export import names
from spec_jax.export.kinds.base import OWN, Form, Header
from spec_jax.target.spec import TargetSpec
from spec_jax.target.tokenizer import Tokenizer

ARCHITECTURE = "SpecJaxDrafter"


def form(path: str) -> Form:
    """The form of the drafter that `drafters.base.load` knows by this path."""

    def to_config(
        drafter: Drafter, target: TargetSpec, header: Header
    ) -> dict[str, Any]:
        config = {
            "architectures": [ARCHITECTURE],
            "model_type": OWN,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "num_target_layers": target.num_layers,
            "dtype": header.dtype,
            OWN: {"drafter": path, "options": dataclasses.asdict(drafter.options)},
        }
        if header.draft_vocab_size is not None:
            config["draft_vocab_size"] = header.draft_vocab_size
        return config

    def from_config(
        config: Mapping[str, Any],
        where: str,
        tensors: Mapping[str, tuple[int, ...]],
        target: TargetSpec,
        tokenizer: Tokenizer | None,
    ) -> tuple[Any, list[str]]:
        del tensors, target, tokenizer
        stored = config[OWN].get("options")
        known = {f.name for f in dataclasses.fields(_options_type(path, where))}
        if not isinstance(stored, Mapping) or set(stored) - known:
            raise UserError(
                f"{where}: the options of drafter {path!r} are {stored!r}, expected "
                f"fields among {', '.join(sorted(known))}; export it again with this "
                "version"
            )
        what = f"{where}: {OWN}.options"
        return loading.to_dataclass(_options_type(path, where), stored, what), []

    return Form(
        name=path,
        title=path,
        architectures=(ARCHITECTURE,),
        pieces=lambda shapes: [
            names.table(name, name.replace("/", ".")) for name in shapes
        ],
        to_config=to_config,
        from_config=from_config,
    )


def path_of(drafter: Drafter) -> str:
    """What `drafters.base.load` takes: a module here, or a dotted path."""
    module = type(drafter.options).__module__
    return module.removeprefix("spec_jax.drafters.")


def path_in(config: Mapping[str, Any], where: str) -> str:
    """The path in a `config.json`; a module elsewhere must be loaded already.

    Raises:
      UserError: no path, or a module that this process has not imported: a folder
        does not choose what code is run.
    """
    own = config.get(OWN)
    path = own.get("drafter") if isinstance(own, Mapping) else None
    if not isinstance(path, str) or not path:
        raise UserError(
            f"{where}: config.json lacks {OWN}.drafter; export the drafter again"
        )
    if "." in path and path not in sys.modules:
        raise UserError(
            f"{where}: its drafter is the module {path!r}, which is not imported; "
            f"if you trust it, import it first (--config.imports=\"('{path}',)\")"
        )
    return path


def _options_type(path: str, where: str) -> type:
    module = path if "." in path else f"spec_jax.drafters.{path}"
    try:
        return importlib.import_module(module).Options
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"{where}: its drafter {path!r} is not in this version; install the one "
            "that exported it"
        ) from error
