"""Names the first thing in which training and serving of a drafter differ.

Everything on the training side goes the way training goes (the template's
rendering, `data.capture` into a store and out of it, `train_outputs`), everything
on the serving side the way serving goes (`decode.prefill` and rounds of
`decode.step`, drafts from the exported folder alone). The checks themselves are
`evals.why`; here is the order they are asked in, and

    why_folder    the folder, and what it says of itself
    why_paths     one prompt and its answer, run every way there is
    why_stages    what the ways gave, and rounds of the real decoder
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import rich.console
import rich.table
import rich.text

from experiments import generate, serving, session
from experiments.why_folder import (
    Folder,
    contract_findings,
    golden_finding,
    probed,
    read,
    weight_findings,
)
from experiments.why_paths import Paths
from experiments.why_stages import feature_findings, round_findings
from spec_jax.config import loading, schema
from spec_jax.core.errors import UserError
from spec_jax.core.quick import quick_jit
from spec_jax.data import prompts
from spec_jax.decode.request import check_prompt
from spec_jax.drafters.frozen import frozen_from_params
from spec_jax.evals import report, why
from spec_jax.evals.why import DIFFERS, OK, SKIPPED, Finding, Runner, Text
from spec_jax.target.loading import Target


def main(cfg: schema.Why, workdir: pathlib.Path) -> int:
    """Prints the table and the sentence; leaves `report.json`.

    Returns:
      0 where all agree, 1 where something differs.

    Raises:
      UserError: no such target or folder, or a prompt that cannot be served.
    """
    target, params = serving.load_serving_target(cfg.target)
    findings = list(examine(cfg, target, params))
    said = why.sentence(findings)
    show(findings, said)
    found = why.first_difference(findings)
    metrics = {
        "agrees": found is None,
        "first_difference": said,
        "checks": why.table(findings),
    }
    with session.hold(workdir, cfg):
        report.write_report(
            workdir,
            "why",
            loading.config_hash(cfg),
            metrics,
            config=loading.plain(cfg),
            root=session.ROOT,
        )
    return 0 if found is None else 1


def show(findings: list[Finding], said: str) -> None:
    """The table, then one sentence."""
    console = rich.console.Console(highlight=False)
    shown = rich.table.Table("check", "item", "result", "detail")
    colours = {OK: "green", DIFFERS: "bold red", SKIPPED: "dim"}
    last = ""
    for f in findings:
        shown.add_row(
            f.check if f.check != last else "",
            rich.text.Text(f.item),
            rich.text.Text(f.status, colours[f.status]),
            rich.text.Text(f.detail),
        )
        last = f.check
    console.print(shown)
    console.print(said, soft_wrap=True, markup=False)


def examine(
    cfg: schema.Why,
    target: Target,
    params: Any,
    *,
    stop: bool = False,
    jit: Callable = quick_jit,
) -> Iterator[Finding]:
    """Every finding in forward order.

    Args:
      cfg: the recipe.
      target: the target.
      params: its parameters in the serving layout.
      stop: nothing after the first difference is computed.
      jit: compiles what is the drafter's.

    Raises:
      UserError: see `main`.
    """
    found = read(cfg.drafter, target)
    mask_id = -1
    if found.exported is not None:
        mask_id = serving.mask_id_of(found.exported.drafter)
    served = generate.encode_prompt(cfg, target, mask_id)
    findings = _examine(cfg, target, params, found, served, jit)
    return why.until_first(findings) if stop else findings


def _examine(cfg, target, params, found: Folder, served, jit) -> Iterator[Finding]:
    yield from contract_findings(cfg, target, found)
    yield from prompt_findings(cfg, target, found, served)
    if found.exported is None:
        for check in why.CHECKS[2:]:
            if check == "weights":
                yield from weight_findings(found)
            else:
                detail = "the drafter could not be read"
                yield Finding(check, "all", SKIPPED, detail)
        return
    drafter = probed(found.exported.drafter, target)
    size_m, window = drafter.layout.num_draft, drafter.layout.window
    rows = len(served) + cfg.serve.max_new_tokens
    room = cfg.serve.max_context
    why.require_rows(rows, 2 * (why.NUM_ANCHORS + size_m + 2), "the prompt's text")
    check_prompt(
        served,
        serving.settings_from(cfg.serve),
        vocab_size=target.spec.vocab_size,
        mask_id=serving.mask_id_of(drafter),
        room=min(room - 2 * window, target.spec.max_context),
    )
    # `why`'s own chunks: several of them, and the last one short.
    chunk = next((c for c in (32, 16, 8) if 2 * c < rows), 4)
    paths = Paths(target, params, served, cfg.serve.max_new_tokens, chunk, room)
    frozen = frozen_from_params(params, found.exported.draft_vocab)
    runner = Runner(drafter, found.exported.params, frozen, room, jit)
    planes = drafter.needs.layer_ids
    one = paths.one_by_one
    text = one.text(planes).padded(room)
    yield from why.visibility_findings(runner, text)
    yield from feature_findings(paths, found, planes)
    yield from why.logit_findings(runner, text, _positions(paths, text, size_m, window))
    yield golden_finding(found, frozen)
    yield from weight_findings(found, drafter)
    anchor = text.length - size_m - 1
    yield from why.state_findings(runner, text, anchor, chunk, window)
    yield from round_findings(runner, paths, text, chunk)


def _positions(paths: Paths, text: Text, size_m: int, window: int):
    """Name -> (text, anchor): near the start, in the middle, at the end, beyond."""
    last = text.length - size_m - 1
    found = {
        "position 3": (text, 3),
        f"position {last // 2}": (text, last // 2),
        f"position {last}": (text, last),
    }
    far = paths.room - window - 1
    if far > last:
        beyond = text.tiled(paths.room)
        found[f"position {far}, beyond the text"] = (beyond, far)
    return found


def prompt_findings(cfg, target: Target, found: Folder, served) -> Iterator[Finding]:
    """The prompt as training renders it, against the served ids."""
    contract = found.contract or {}
    thinking = bool(contract.get("thinking", cfg.thinking))
    try:
        trained = prompts.render_prompt(
            target, generate.prompt_of(cfg), thinking=thinking
        )
    except UserError as error:
        yield Finding("template", "rendering", DIFFERS, str(error))
        return
    tokenizer = target.tokenizer
    yield from why.template_findings(
        trained, served, tokenizer.decode, tokenizer.special_ids
    )
