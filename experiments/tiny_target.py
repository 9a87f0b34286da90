"""The tiny recipes' target: random weights that learn a small language first.

It takes some seconds on one core, needs no download, and the result is kept as
an ordinary Hugging Face folder: a second run reads it back bit for bit, and it
may be named as `target.source` like any other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import safetensors.numpy

from spec_jax.config import schema
from spec_jax.core.errors import UserError
from spec_jax.data import tiny_corpus
from spec_jax.data.files import sha256_of, write_atomically
from spec_jax.nn import layers
from spec_jax.target import checkpoint, loading, model, safetensors_loader
from spec_jax.target.loading import Target
from spec_jax.target.spec import TargetSpec

MASK = tiny_corpus.MASK

_NAME = "tiny"
_CHECKSUMS = "checksums.json"
_WARMUP = 0.1  # share of the steps
_CLIP = 1.0  # global norm
# Standard deviation of initial weights; 0.02 is what `model.init_params` draws.
_INIT_STD = 0.02
_INITIAL_STD = {
    "embed": 0.5,
    "layers/qkv": 0.12,
    "layers/gate_up": 0.12,
    "layers/out": 0.04,
    "layers/down": 0.04,
}
_REPORTED = 10  # steps whose mean is the last loss


def load(
    target: schema.Target, seed: int = 0, cache_folder: str | None = None
) -> Target:
    """The tiny target of a recipe, in the recipe's dtype.

    Args:
      target: the recipe's section.
      seed: see `make_tiny_target`.
      cache_folder: where it is kept; default below
        `spec_jax.target.loading.default_cache_dir()`.

    Raises:
      UserError: see `make_tiny_target`.
    """
    folder = cache_folder or os.path.join(loading.default_cache_dir(), "targets")
    made = make_tiny_target(target.tiny, seed, folder)
    dtype = jnp.dtype(target.dtype)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), made.params)
    return dataclasses.replace(made, params=params)


def make_tiny_target(
    options: schema.TinyTarget, seed: int, cache_folder: str | None
) -> Target:
    """Trains a tiny target, or reads back the one that was trained before.

    Args:
      options: sizes and training.
      seed: of weights and corpus; the same seed gives the same target.
      cache_folder: where it is kept, or None to keep nothing.

    Returns:
      The target, float32; `target.tokenizer.id_of(MASK)` is a mask token that
      no text holds.

    Raises:
      UserError: it did not learn, or its weights are not finite.
    """
    if cache_folder is None:
        with tempfile.TemporaryDirectory() as folder:
            _write_folder(folder, *_train(options, seed))
            return _read_folder(folder)
    folder = os.path.join(cache_folder, f"tiny-{_key(options, seed)}")
    if not _is_whole(folder):
        trained = _train(options, seed)
        try:
            _keep(folder, *trained)
        except OSError as error:
            warnings.warn(
                f"the tiny target was not kept in {cache_folder} ({error}); free some "
                "room or name another folder to make the next start fast",
                stacklevel=2,
            )
            with tempfile.TemporaryDirectory() as folder:
                _write_folder(folder, *trained)
                return _read_folder(folder)
    return _read_folder(folder)


def make_spec(options: schema.TinyTarget) -> TargetSpec:
    """The sizes of a tiny target."""
    ids = tiny_corpus.vocabulary()
    return TargetSpec(
        name=_NAME,
        family=options.family,
        num_layers=options.num_layers,
        hidden_size=options.hidden_size,
        mlp_size=options.mlp_size,
        num_heads=options.num_heads,
        num_kv_heads=options.num_kv_heads,
        head_dim=options.head_dim,
        vocab_size=len(ids),
        qk_norm=options.family == "qwen3",
        max_context=options.max_context,
        eos_ids=(ids[tiny_corpus.TURN_END], ids[tiny_corpus.END_OF_TEXT]),
        pad_id=ids[tiny_corpus.END_OF_TEXT],
    )


# ---- Training.


def training_logits(spec: TargetSpec, params: Any, tokens_BT):
    """Logits [B, T, V] of whole rows from position 0, float32.

    The same numbers as `model.forward` over an empty cache. That one reads its
    history in a loop whose length is data, which has no reverse-mode gradient;
    this one has no history.
    """
    tree = params["params"]
    size_b, size_t = tokens_BT.shape
    cos, sin = layers.rotary_tables(
        jnp.arange(size_t)[None], spec.head_dim, spec.rope_theta
    )
    causal_TT = jnp.tril(jnp.ones((size_t, size_t), bool))

    def layer_step(x_BTD, w):
        y_BTD = layers.rms_norm(x_BTD, w["attn_norm"], spec.norm_eps)
        q, k, v = layers.split_qkv(jnp.einsum("btd,dgpc->btgpc", y_BTD, w["qkv"]))
        if spec.qk_norm:
            q = layers.rms_norm(q, w["q_norm"], spec.norm_eps)
            k = layers.rms_norm(k, w["k_norm"], spec.norm_eps)
        q = layers.rotate(q, cos[:, :, None], sin[:, :, None])
        k = layers.rotate(k, cos, sin)
        scores = jnp.einsum("btgpc,bsgc->bgpts", q, k) * spec.head_dim**-0.5
        weights = jax.nn.softmax(jnp.where(causal_TT, scores, -jnp.inf), -1)
        mixed = jnp.einsum("bgpts,bsgc->btgpc", weights, v)
        x_BTD = x_BTD + mixed.reshape(size_b, size_t, -1) @ w["out"]
        y_BTD = layers.rms_norm(x_BTD, w["mlp_norm"], spec.norm_eps)
        return x_BTD + layers.gated_mlp(y_BTD, w["gate_up"], w["down"]), None

    x_BTD, _ = jax.lax.scan(layer_step, tree["embed"][tokens_BT], tree["layers"])
    hidden_BTD = layers.rms_norm(x_BTD, tree["final_norm"], spec.norm_eps)
    return model.logits(params, hidden_BTD)


def _optimiser(options: schema.TinyTarget) -> optax.GradientTransformation:
    steps = options.train_steps
    lr = optax.warmup_cosine_decay_schedule(
        0.0, options.lr, max(1, int(_WARMUP * steps)), max(2, steps), 0.05 * options.lr
    )
    return optax.chain(
        optax.clip_by_global_norm(_CLIP), optax.adam(lr, b1=0.9, b2=0.98)
    )


def _train(options: schema.TinyTarget, seed: int) -> tuple[TargetSpec, Any]:
    """Random weights after `train_steps` steps on the corpus; numpy arrays."""
    spec = make_spec(options)
    params = _rescale(model.init_params(spec, jax.random.key(seed)))
    if options.train_steps:
        params = _fit(spec, params, options, seed)
    return spec, jax.tree.map(np.asarray, params)


def _rescale(params: Any) -> Any:
    """Initial weights of other sizes: a narrow model learns faster from them.

    Projections that keep the size of what they read (1 / sqrt(D) for D = 64),
    a residual stream that starts as the token and not as the layers' noise.
    """
    flat = checkpoint.flatten(params)
    sizes = {path: size / _INIT_STD for path, size in _INITIAL_STD.items()}
    return checkpoint.nest({path: x * sizes.get(path, 1.0) for path, x in flat.items()})


def _fit(spec: TargetSpec, params: Any, options: schema.TinyTarget, seed: int) -> Any:
    optimiser = _optimiser(options)

    def loss_of(params, ids_BT, real_BT):
        logits_BTV = training_logits(spec, params, ids_BT[:, :-1])
        ce_BT = optax.softmax_cross_entropy_with_integer_labels(
            logits_BTV, ids_BT[:, 1:]
        )
        return (ce_BT * real_BT[:, 1:]).sum() / real_BT[:, 1:].sum()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, ids_BT, real_BT):
        loss, grads = jax.value_and_grad(loss_of)(params, ids_BT, real_BT)
        updates, state = optimiser.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    tokenizer, template = tiny_corpus.make_tokenizer(), tiny_corpus.make_template()
    rng = np.random.default_rng([seed, 1])
    counts_V = np.zeros(spec.vocab_size)
    state, losses = optimiser.init(params), []
    for _ in range(options.train_steps):
        ids_BT, real_BT = tiny_corpus.make_rows(
            tokenizer, template, rng, options.batch, options.seq_len
        )
        counts_V += np.bincount(
            ids_BT.ravel(), weights=real_BT.ravel(), minlength=spec.vocab_size
        )
        params, state, loss = step(params, state, ids_BT, real_BT)
        losses.append(loss)
    check_learned([float(loss) for loss in losses], counts_V)
    return params


def check_learned(losses: list[float], counts_V: np.ndarray) -> None:
    """Refuses a target that knows no more than how frequent each token is.

    Args:
      losses: of every step, nats per token.
      counts_V: how often training showed each token.

    Raises:
      UserError: the last losses are not finite or not below the entropy of the
        token frequencies.
    """
    share_V = counts_V[counts_V > 0] / counts_V.sum()
    bound = float(-(share_V * np.log(share_V)).sum())
    last = float(np.mean(losses[-_REPORTED:]))
    if not last < bound:
        raise UserError(
            f"target.tiny did not learn: its loss went from {losses[0]:.2f} to "
            f"{last:.2f} nats in train_steps={len(losses)}, and token frequencies "
            f"alone give {bound:.2f}; raise target.tiny.train_steps or lower "
            "target.tiny.lr"
        )


# ---- Keeping.


def _key(options: schema.TinyTarget, seed: int) -> str:
    """What a kept target depends on: options, seed and the code that made it."""
    code = [
        inspect.getsource(module)
        for module in (inspect.getmodule(_key), tiny_corpus, layers, model)
    ]
    content = [dataclasses.asdict(options), seed, jax.__version__, *code]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


def _read_folder(folder: str) -> Target:
    loaded = safetensors_loader.load_safetensors_folder(folder)
    spec = dataclasses.replace(loaded.spec, name=_NAME)
    return Target(
        spec=spec,
        params=jax.tree.map(jnp.asarray, loaded.params),
        tokenizer=loaded.tokenizer,
        chat_template=loaded.chat_template,
        fingerprint=loading.fingerprint_folder(folder, spec),
    )


def _keep(folder: str, spec: TargetSpec, params: Any) -> None:
    """Writes a whole folder beside `folder`, then renames it there."""
    parent = os.path.dirname(folder)
    os.makedirs(parent, exist_ok=True)
    with _work_folder(parent) as work:
        fresh = os.path.join(work, "fresh")
        os.makedirs(fresh)
        _write_folder(fresh, spec, params)
        if os.path.isdir(folder):  # a torn one: out of the way first
            os.rename(folder, os.path.join(work, "torn"))
        try:
            os.rename(fresh, folder)
        except OSError:
            if not _is_whole(folder):
                raise  # else another process was first; its copy is as good


@contextlib.contextmanager
def _work_folder(parent: str) -> Iterator[str]:
    work = tempfile.mkdtemp(prefix=".writing-", dir=parent)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_folder(folder: str, spec: TargetSpec, params: Any) -> None:
    """The target as a Hugging Face folder, and the checksum of each file."""
    weights = checkpoint.export_llama_names(params, spec)
    content = {
        safetensors_loader.SINGLE: safetensors.numpy.save(weights, {"format": "pt"}),
        "config.json": _json(_config(spec)),
        "tokenizer.json": tiny_corpus.make_tokenizer().json_text.encode(),
        "tokenizer_config.json": _json({"eos_token": tiny_corpus.TURN_END}),
        "chat_template.jinja": tiny_corpus.TEMPLATE.encode(),
    }
    for name, data in content.items():
        write_atomically(os.path.join(folder, name), data)
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in content.items()}
    write_atomically(os.path.join(folder, _CHECKSUMS), _json(sums))


def _is_whole(folder: str) -> bool:
    try:
        with open(os.path.join(folder, _CHECKSUMS), encoding="utf-8") as file:
            sums = json.load(file)
        return bool(sums) and all(
            sha256_of(os.path.join(folder, name)) == sha for name, sha in sums.items()
        )
    except (OSError, ValueError, AttributeError):
        return False


def _config(spec: TargetSpec) -> dict[str, Any]:
    architecture = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    return {
        "architectures": [architecture[spec.family]],
        "model_type": spec.family,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.mlp_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "max_position_embeddings": spec.max_context,
        "tie_word_embeddings": spec.tied,
        "eos_token_id": list(spec.eos_ids),
        "pad_token_id": spec.pad_id,
        "hidden_act": "silu",
    }


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode()
