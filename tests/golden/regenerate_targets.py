"""Writes the golden target folders beside this file, with the public library.

Each folder is a seeded random model saved by `transformers`, and
`expected_logits.npz`: input ids and the logits that library computes for them
in float32. Needs torch and transformers, which the tests do not:

    python tests/golden/regenerate_targets.py

tiny_llama: Llama, untied head, two shards with an index, `rope_theta` at the
  top of config.json, float32.
tiny_qwen3: Qwen3 (q/k norm), tied head, one file, `rope_parameters`, bfloat16.
"""

from __future__ import annotations

import json
import pathlib
import shutil

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).resolve().parent

SIZES = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def save(name: str, model: torch.nn.Module, edit=None, **options) -> None:
    """Saves one model's weights, configuration and expected logits.

    Args:
      name: of the folder.
      model: what to save.
      edit: changes the configuration before the model is read back.
      **options: of `save_pretrained`.
    """
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, **options)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if edit is not None:
        edit(config)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    # The logits are those of the files as written, in float32.
    model = type(model).from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(
        3, SIZES["vocab_size"], (2, 24), generator=torch.Generator().manual_seed(7)
    )
    with torch.no_grad():
        logits = model(ids).logits
    np.savez_compressed(
        folder / "expected_logits.npz",
        ids=ids.numpy().astype(np.int32),
        logits=logits.numpy(),
    )


def spread(model: torch.nn.Module) -> torch.nn.Module:
    """Larger seeded weights: attention must matter, and norms differ from one."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                weight.copy_(1 + 0.3 * noise)
            else:
                weight.copy_(noise * (1.5 / weight.shape[-1] ** 0.5))
    return model


def older_rope(config: dict) -> None:
    """The form that older versions of the library wrote."""
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["rope_scaling"] = None


def main() -> None:
    """Writes both folders."""
    transformers.set_seed(0)
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=3,
            tie_word_embeddings=False,
            rope_parameters=rope,
            rms_norm_eps=1e-5,
            **SIZES,
        )
    )
    save("tiny_llama", spread(llama), edit=older_rope, max_shard_size="150KB")

    rope = {"rope_type": "default", "rope_theta": 20000.0}
    qwen3 = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            num_hidden_layers=2,
            tie_word_embeddings=True,
            rope_parameters=rope,
            rms_norm_eps=1e-6,
            **SIZES,
        )
    )
    save("tiny_qwen3", spread(qwen3).to(torch.bfloat16))


if __name__ == "__main__":
    main()
