"""Sizes of published targets: what a plan or a count needs without a checkpoint."""

from __future__ import annotations

from spec_jax.target.spec import TargetSpec

_QWEN3 = {
    "family": "qwen3",
    "num_layers": 36,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rope_theta": 1e6,
    "norm_eps": 1e-6,
    "qk_norm": True,
    "max_context": 40960,
    "eos_ids": (151645,),
    "pad_id": 151643,
}

SPECS = {
    spec.name: spec
    for spec in (
        TargetSpec(
            name="Qwen3-4B", hidden_size=2560, mlp_size=9728, tied=True, **_QWEN3
        ),
        TargetSpec(name="Qwen3-8B", hidden_size=4096, mlp_size=12288, **_QWEN3),
    )
}
