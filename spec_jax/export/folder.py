"""The portable drafter folder: weights, configuration, contract, golden round.

    config.json         what any reader of such folders needs, and the run's seed
    model.safetensors   public names, `[out, in]`; d2t and t2d when the
                        vocabulary is reduced
    contract.json       the contract the drafter was trained under
    golden.safetensors  a round to draft again after loading
    manifest.json       sha256 of each of the above; written last

A folder is written beside its place and renamed, so that it is there whole or
not at all, and a reader compares every checksum. A folder from elsewhere has
neither contract nor manifest; what can be compared is, what was converted is
said (`converters`), and a note says what could not be compared.
"""

from __future__ import annotations

from spec_jax.export.reader import Exported, read_folder
from spec_jax.export.shared import TARGET_FACTS, target_facts
from spec_jax.export.writer import Written, seed_in, write_folder

__all__ = [
    "TARGET_FACTS",
    "Exported",
    "Written",
    "read_folder",
    "seed_in",
    "target_facts",
    "write_folder",
]
