"""Our plain decoding beside transformers': same prompts, weights and threads.

The loaded target is written as a Hugging Face folder and read back by
transformers, so both run the same float32 weights. Each prompt is decoded by
one and then by the other, in alternating order; a time is that of a whole
answer, prefill included, and no answer ends early. Medians are compared.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import safetensors.numpy

from experiments import serving
from spec_jax.config import schema
from spec_jax.core.errors import UserError
from spec_jax.data import prompts
from spec_jax.decode.request import Settings
from spec_jax.target import checkpoint
from spec_jax.target.loading import Target
from spec_jax.target.spec import TargetSpec

PEERS = ("torch", "transformers")

# (prompt ids, new tokens) -> the new ids, greedy, exactly so many.
Decode = Callable[[list[int], int], list[int]]

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def main(cfg: schema.BenchPeers, workdir: pathlib.Path) -> dict[str, Any]:
    """Metrics of `configs/bench/peers.py`.

    Raises:
      UserError: torch or transformers is missing, or the recipe asks for weights
        or threads that the comparison cannot have.
    """
    del workdir
    peers = import_peers()
    if cfg.target.dtype != "float32":
        raise UserError(
            f"target.dtype={cfg.target.dtype!r} cannot be compared here, where both "
            "sides run float32; leave it at float32"
        )
    threads = use_cores(cfg.bench.threads)
    peers["torch"].set_num_threads(threads)
    target, params = serving.load_serving_target(cfg.target)
    serve = dataclasses.replace(cfg.serve, slots=1)
    engine = serving.make_engine(target, params, serve)
    count = cfg.bench.max_new_tokens
    asked = read_prompts(cfg.bench, target, engine.room - count)

    def ours(ids: list[int], new: int) -> list[int]:
        settings = Settings(max_new_tokens=new, ignore_eos=True)
        return engine.generate([ids], settings)[0].tokens

    with tempfile.TemporaryDirectory() as folder:
        write_hf_folder(folder, target)
        theirs = load_transformers(peers, folder)
    found = compare(ours, theirs, asked, count, cfg.bench.warmup, cfg.bench.repeats)
    return found | {
        "threads": threads,
        "prompts": len(asked),
        "new_tokens": count,
        "repeats": cfg.bench.repeats,
        "torch": str(peers["torch"].__version__),
        "transformers": str(peers["transformers"].__version__),
    }


def import_peers() -> dict[str, Any]:
    """The public packages, by name.

    Raises:
      UserError: one of them is not installed.
    """
    found = {}
    for name in PEERS:
        try:
            found[name] = importlib.import_module(name)
        except ImportError as error:
            raise UserError(
                f"package {name!r} is not installed, and this recipe compares with it; "
                "run `make parity`, which installs it in an environment of its own"
            ) from error
    return found


def use_cores(threads: int) -> int:
    """Keeps this process on so many cores, before JAX sizes its thread pool.

    Args:
      threads: of each peer; 0 is every core.

    Returns:
      The number both peers get.

    Raises:
      UserError: there are not so many cores.
    """
    if not hasattr(os, "sched_getaffinity"):
        return threads or os.cpu_count() or 1
    cores = sorted(os.sched_getaffinity(0))
    if threads > len(cores):
        raise UserError(
            f"bench.threads={threads} is more than the {len(cores)} cores this process "
            "may use; ask for at most that many, or 0 for all"
        )
    chosen = cores[: threads or None]
    os.sched_setaffinity(0, chosen)
    return len(chosen)


def read_prompts(bench: schema.Bench, target: Target, room: int) -> list[list[int]]:
    """Token ids of every prompt set that has a file.

    Raises:
      UserError: no set has one, or a prompt is longer than `room` tokens.
    """
    limit = bench.max_prompts or None
    found = []
    for _, path in bench.prompt_sets:
        if path:
            read = prompts.named_prompts(path, limit)
            found += [prompts.render_prompt(target, p, context=room) for p in read]
    if not found:
        raise UserError(
            f"bench.prompt_sets={bench.prompt_sets} names no file; give one set a path "
            'or "builtin"'
        )
    return found


def write_hf_folder(folder: str | os.PathLike[str], target: Target) -> None:
    """The target as `config.json` and `model.safetensors`, for any reader of both."""
    folder = pathlib.Path(folder)
    weights = checkpoint.export_llama_names(target.params, target.spec)
    safetensors.numpy.save_file(
        weights, folder / "model.safetensors", metadata={"format": "pt"}
    )
    (folder / "config.json").write_text(json.dumps(hf_config(target.spec), indent=1))


def hf_config(spec: TargetSpec) -> dict[str, Any]:
    """A target's sizes under the names of Hugging Face configurations."""
    return {
        "architectures": [_ARCHITECTURES[spec.family]],
        "model_type": spec.family,
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.mlp_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "rope_theta": spec.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied,
        "max_position_embeddings": spec.max_context,
        "hidden_act": "silu",
        "attention_bias": False,
        # No end token: every answer has its full length.
        "eos_token_id": None,
        "pad_token_id": spec.pad_id,
    }


def load_transformers(peers: dict[str, Any], folder: str) -> Decode:
    """A greedy decoder of the folder's model, by transformers' own `generate`."""
    torch, transformers = peers["torch"], peers["transformers"]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, use_cache=True, pad_token_id=model.config.pad_token_id
    )

    def decode(ids: list[int], new: int) -> list[int]:
        prompt_BS = torch.tensor([ids])
        with torch.inference_mode():
            text_BS = model.generate(
                prompt_BS,
                attention_mask=torch.ones_like(prompt_BS),
                max_new_tokens=new,
            )
        return text_BS[0, len(ids) :].tolist()

    return decode


def compare(
    ours: Decode,
    theirs: Decode,
    asked: Sequence[list[int]],
    count: int,
    warmup: int,
    repeats: int,
) -> dict[str, Any]:
    """Each prompt by both, in alternating order; medians over prompts and repeats.

    Args:
      ours, theirs: the two decoders.
      asked: prompts.
      count: new tokens of each answer.
      warmup: prompts thrown away first.
      repeats: turns over all prompts.

    Raises:
      ValueError: a decoder made another number of tokens than it was asked for.
    """
    for ids in list(asked)[:warmup]:
        ours(ids, count)
        theirs(ids, count)
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    same = []
    turn = 0
    for _ in range(repeats):
        for ids in asked:
            made = {}
            both = [("ours", ours), ("theirs", theirs)]
            for name, decode in both if turn % 2 == 0 else both[::-1]:
                start = time.perf_counter()
                made[name] = decode(ids, count)
                seconds[name].append(time.perf_counter() - start)
                if len(made[name]) != count:
                    raise ValueError(
                        f"{name} made {len(made[name])} tokens where {count} were asked"
                    )
            same.append(_equal_tokens(made["ours"], made["theirs"]))
            turn += 1
    rate = {name: count / statistics.median(each) for name, each in seconds.items()}
    return {
        "plain_tokens_per_s": rate["ours"],
        "transformers_tokens_per_s": rate["theirs"],
        "plain_over_transformers": rate["ours"] / rate["theirs"],
        "equal_outputs": float(np.mean([n == count for n in same])),
        "equal_tokens_before_first_difference": float(np.mean(same)),
    }


def _equal_tokens(a: list[int], b: list[int]) -> int:
    """Tokens before two answers first differ."""
    differ = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
    return differ[0] if differ else len(a)
