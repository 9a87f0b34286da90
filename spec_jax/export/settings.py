"""Reading and writing `config.json`: what all kinds of drafter share.

Readers differ on where a key lives (drafter contracts, sections 4.1, 5.1 and 13),
so `Settings` looks into the nested object first and then at the top level, says
where they differ, and refuses by name what would change the forward in a way the
drafter does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spec_jax.core.errors import UserError
from spec_jax.core.features import check_layer_ids
from spec_jax.core.json_fields import is_number
from spec_jax.target.spec import TargetSpec
from spec_jax.target.tokenizer import Tokenizer

FULL, SLIDING = "full_attention", "sliding_attention"

# Settings that no drafter here has: they must be absent or neutral, wherever they
# stand. A kind removes those it reads.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1),
    "bias": (None, False),
    "confidence_head_with_markov": (None, False),
    "conv_group_size": (None,),
    "conv_kernel_size": (None,),
    "embedding_multiplier": (None, 1),
    "enable_confidence_head": (None, False),
    "fc_norm": (None, False),
    "final_logit_softcapping": (None, 0),
    "hidden_act": (None, "silu"),
    "input_embedding_scale": (None, 1),
    "logits_scaling": (None, 1),
    "markov_head_type": (None,),
    "markov_rank": (None, 0),
    "mlp_bias": (None, False),
    "norm_before_fc": (None, False),
    "norm_before_residual": (None, False),
    "output_multiplier": (None, 1),
    "partial_rotary_factor": (None, 1),
    "projector_type": (None,),
    "quantization_config": (None,),
    "qkv_bias": (None, False),
    "rope_is_neox_style": (None, True),
    "sample_from_anchor": (None, False),
    "selector_rank": (None,),
    "selector_top_k": (None,),
    "speculators_model_type": (None,),
    "swiglu_alpha": (None,),
    "swiglu_limit": (None,),
    "use_aux_norm": (None, False),
    "use_gemma_norm": (None, False),
}
# Families of keys of which only those a kind reads may stand there.
_FAMILIES = ("conv_", "selector_", "markov_", "confidence_")
_ROPE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (None, 1),
    "rope_dim": (None,),
    "factor": (None, 1),
    "mrope_section": (None,),
    "mrope_interleaved": (None, False),
}
_HEADS = {
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_size": "intermediate_size",
}


class Settings:
    """One `config.json`, with sentences for what is wrong in it.

    Attributes:
      config: the json object.
      nested: the inner object's keys, which come first.
      where: names the folder in errors.
      notes: what the file left open or says twice.
    """

    def __init__(
        self, config: Mapping[str, Any], where: str, nested: Sequence[str] = ()
    ):
        """Args: the object, its name in errors, names of inner objects."""
        self.config, self.where = config, where
        self.notes: list[str] = []
        self.nested: dict[str, Any] = {}
        self._from: dict[str, str] = {}
        self._name = nested[0] if nested else ""
        for name in nested:
            inner = config.get(name) or {}
            self.nested |= inner
            self._from |= dict.fromkeys(inner, name)

    def value(self, key: str) -> Any:
        """The setting, from the inner object before the top level; None: absent."""
        inner, outer = self.nested.get(key), self.config.get(key)
        if inner is not None and outer is not None and inner != outer:
            said = f"{key} is {inner!r} in {self._from[key]} and {outer!r} at the top "
            note = said + "level; the first is used"
            if note not in self.notes:
                self.notes.append(note)
        return outer if inner is None else inner

    def layers(self, tensors: Mapping[str, tuple[int, ...]]) -> int:
        """How many layers there are: never more than tensors, which counting trusts.

        Raises:
          UserError: none, or more than the weights can hold.
        """
        found = self.need("num_hidden_layers")
        if not 1 <= found <= len(tensors):
            raise UserError(
                f"{self.where}: num_hidden_layers={found} does not fit its "
                f"{len(tensors)} tensors; weights and config.json are not of one "
                "drafter"
            )
        return found

    def need(self, key: str, kind: type = int) -> Any:
        """A setting that must be there."""
        found = self.value(key)
        if found is None:
            raise UserError(
                f"{self.where}: config.json lacks {key}; write the value the drafter "
                "was trained with"
            )
        return self.typed(found, kind, key)

    def optional(self, key: str, kind: type, default: Any) -> Any:
        """A setting that may be absent."""
        found = self.value(key)
        return default if found is None else self.typed(found, kind, key)

    def typed(self, found: Any, kind: type, key: str) -> Any:
        """Refuses a json value of another type (true is no number here)."""
        is_kind = is_number(found) if kind is float else type(found) is kind
        if not is_kind or (kind is int and not is_number(found)):
            raise UserError(
                f"{self.where}: config.json has {key}={found!r}, which is no "
                f"{kind.__name__}; write the value the drafter was trained with"
            )
        return kind(found) if kind is float else found

    def neutral(self, title: str, reads: Iterable[str] = ()) -> None:
        """Refuses settings of a forward that this kind does not have.

        Args:
          title: the kind, in errors.
          reads: keys of `NEUTRAL`, or of its families, that the kind understands.

        Raises:
          UserError: naming the setting.
        """
        reads = set(reads)
        fix = f"only plain {title} drafters are read here"
        scopes = ((self.config, ""), (self.nested, f"{self._name}."))
        for scope, prefix in scopes:
            for key in sorted(set(scope) - reads):
                allowed = NEUTRAL.get(key)
                if allowed is None:
                    known = not key.startswith(_FAMILIES)
                else:
                    known = scope[key] in allowed
                if not known:
                    raise UserError(
                        f"{self.where}: config.json sets {prefix}{key}={scope[key]!r}; "
                        f"{fix}"
                    )

    def known_inside(self, title: str, keys: Iterable[str]) -> None:
        """Refuses inner keys that nothing here reads."""
        for key in sorted(set(self.nested) - set(keys) - set(NEUTRAL)):
            raise UserError(
                f"{self.where}: config.json sets {self._from[key]}.{key}="
                f"{self.nested[key]!r}, which is not known; only plain {title} "
                "drafters are read here"
            )

    def model_type(self, title: str, *allowed: str) -> None:
        """Refuses another base class of the layers."""
        found = self.config.get("model_type", allowed[0])
        if found not in allowed:
            raise UserError(
                f"{self.where}: model_type is {found!r}, expected "
                f"{' or '.join(repr(a) for a in allowed)}; only plain {title} drafters "
                "are read here"
            )

    def same_target(self, target: TargetSpec, keys: Iterable[str]) -> None:
        """Refuses a drafter whose sizes are not this target's.

        Raises:
          UserError: naming the size.
        """
        sizes = {
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "target_hidden_size": target.hidden_size,
            "num_target_layers": target.num_layers,
        }
        for key in keys:
            theirs, ours = self.value(key), sizes[key]
            if theirs is None and key in ("num_target_layers", "target_hidden_size"):
                if key == "num_target_layers":
                    self.notes.append(
                        "num_target_layers is not given and was not compared"
                    )
            elif theirs != ours:
                raise UserError(
                    f"{self.where} was made for another target: {key} is {theirs!r}, "
                    f"expected {ours!r}; use a drafter made for {target.name}"
                )

    def heads(self, hidden_size: int | None = None) -> dict[str, int]:
        """Sizes of attention and MLP, in the options' words.

        Args:
          hidden_size: of a family whose files may leave `head_dim` to its readers,
            which then take the width over the heads; None: it must be there.
        """
        sizes = {}
        for ours, theirs in _HEADS.items():
            if ours == "head_dim" and hidden_size and self.value(theirs) is None:
                sizes[ours] = hidden_size // sizes["num_heads"]
                self.notes.append(
                    f"head_dim is not given; its readers take {sizes[ours]}, the width "
                    "over the heads"
                )
            else:
                sizes[ours] = self.need(theirs)
        return sizes

    def fc_width(
        self,
        tensors: Mapping[str, tuple[int, ...]],
        count: int,
        target: TargetSpec,
        key: str,
    ) -> None:
        """Refuses an `fc` that takes another number of layers than are named.

        Args:
          tensors: name -> shape of the weights.
          count: layers that the file names.
          target: their width.
          key: where they are named.
        """
        width = tensors.get("fc.weight", (0, 0))[-1]
        if width and width != count * target.hidden_size:
            raise UserError(
                f"{self.where}: tensor fc.weight takes {width} numbers, which is "
                f"{width / target.hidden_size:g} layers, but {key} names {count}; "
                "weights and config.json are not of one drafter"
            )

    def layer_ids(self, found: Any, key: str, target: TargetSpec) -> tuple[int, ...]:
        """A list of captured layer outputs.

        Raises:
          UserError: no list, or ids that this target does not have.
        """
        if not isinstance(found, (list, tuple)) or not found:
            raise UserError(f"{self.where}: {key}={found!r} must list layer ids")
        ids = tuple(self.typed(i, int, key) for i in found)
        try:
            check_layer_ids(ids, target.num_layers)
        except UserError as error:
            raise UserError(f"{self.where}: {error}") from error
        return ids

    def layer_types(self, num_layers: int) -> tuple[tuple[str, ...], int | None]:
        """Kind of each layer, and the window of the sliding ones."""
        kinds, window = self.value("layer_types"), self.value("sliding_window")
        if kinds is None:
            if window is not None and self.config.get("use_sliding_window"):
                raise UserError(
                    f"{self.where}: config.json sets sliding_window={window} without "
                    f"layer_types; write layer_types, {FULL!r} or {SLIDING!r} per layer"
                )
            kinds = [FULL] * num_layers
        if (
            not isinstance(kinds, (list, tuple))
            or len(kinds) != num_layers
            or any(kind not in (FULL, SLIDING) for kind in kinds)
        ):
            raise UserError(
                f"{self.where}: layer_types={kinds!r} must name {FULL!r} or "
                f"{SLIDING!r} for each of the {num_layers} layers"
            )
        if SLIDING not in kinds:
            return tuple(kinds), None
        if self.config.get("use_sliding_window") is False:
            raise UserError(
                f"{self.where}: use_sliding_window is false but layer_types has "
                f"{SLIDING!r}; readers disagree on the window, so make them agree"
            )
        if window is None or self.typed(window, int, "sliding_window") < 1:
            raise UserError(
                f"{self.where}: sliding_window={window!r} must be at least 1 when "
                f"layer_types has {SLIDING!r}"
            )
        return tuple(kinds), window

    def is_causal(self, layer_types: Sequence[str]) -> bool | None:
        """What overrides the layers' own order; None where nothing does."""
        found = self.value("is_causal")
        if found is None:
            return None
        found = self.typed(found, bool, "is_causal")
        own = all(found == (kind == SLIDING) for kind in layer_types)
        return None if own else found

    def mask_id(self, target: TargetSpec, tokenizer: Tokenizer | None) -> int:
        """The token that fills draft rows."""
        mask_id = self.value("mask_token_id")
        if mask_id is None:
            token = self.value("mask_token")
            if token is None or tokenizer is None:
                raise UserError(
                    f"{self.where}: config.json lacks mask_token_id; no id is right "
                    "for every tokenizer, so write the one the drafter was trained with"
                )
            mask_id = tokenizer.id_of(token)
        if not 0 <= self.typed(mask_id, int, "mask_token_id") < target.vocab_size:
            raise UserError(
                f"{self.where}: mask_token_id={mask_id} lies outside the target's "
                f"{target.vocab_size} tokens; use a drafter made for {target.name}"
            )
        return mask_id

    def rope_theta(self, default: float | None = None) -> float:
        """`rope_parameters`, else `rope_theta`; they must agree where both are.

        Args:
          default: base of a file that says none, where its readers agree on one.

        Raises:
          UserError: scaled or partial rotation, a base said twice or not at all.
        """
        theta = self.config.get("rope_theta")
        for key in ("rope_parameters", "rope_scaling"):
            rope = self.config.get(key) or {}
            kind = rope.get("rope_type", rope.get("type", "default"))
            if kind != "default":
                raise UserError(
                    f"{self.where}: config.json sets {key} of type {kind!r}; only "
                    "'default' (unscaled) rotary positions are read here"
                )
            for name, allowed in _ROPE_NEUTRAL.items():
                if rope.get(name) not in allowed:
                    raise UserError(
                        f"{self.where}: config.json sets {key}.{name}={rope[name]!r}; "
                        "whole heads are rotated here, unscaled"
                    )
            base = rope.get("rope_theta")
            if base is not None:
                if theta is not None and theta != base:
                    raise UserError(
                        f"{self.where}: rope_theta={theta} but {key}.rope_theta={base}"
                        "; keep the one the weights were trained with"
                    )
                theta = base
        if theta is None:
            if default is None:
                raise UserError(
                    f"{self.where}: config.json has neither rope_parameters nor "
                    "rope_theta, and readers disagree on the default (10000 or "
                    "1000000); write the base the drafter was trained with"
                )
            self.notes.append(
                f"rope_theta is not given; its trainers and readers take {default:g}"
            )
            theta = default
        return float(self.typed(theta, float, "rope_theta"))


def common(target: TargetSpec, options: Any, header: Any) -> dict[str, Any]:
    """Settings that every kind writes alike.

    Args:
      target: sizes of the target.
      options: resolved options with the usual sizes.
      header: see `kinds.base.Header`.
    """
    config = {
        "hidden_size": target.hidden_size,
        "intermediate_size": options.mlp_size,
        "num_attention_heads": options.num_heads,
        "num_key_value_heads": options.num_kv_heads,
        "head_dim": options.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": options.norm_eps,
        "rope_theta": options.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": options.rope_theta,
        },
        "max_position_embeddings": target.max_context,
        "vocab_size": target.vocab_size,
        "bos_token_id": None,
        "eos_token_id": one_or_list(target.eos_ids),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": header.dtype,
    }
    if header.draft_vocab_size is not None:
        config["draft_vocab_size"] = header.draft_vocab_size
    return config


def layers(options: Any) -> dict[str, Any]:
    """How the layers of a block drafter look back, as its readers ask."""
    sliding = SLIDING in options.layer_types
    config = {
        "num_hidden_layers": options.num_layers,
        "layer_types": list(options.layer_types),
        "sliding_window": options.sliding_window if sliding else None,
        "use_sliding_window": sliding,
        "max_window_layers": options.num_layers,
    }
    if options.is_causal is not None and any(
        options.is_causal != (kind == SLIDING) for kind in options.layer_types
    ):
        config["is_causal"] = options.is_causal
    return config


def one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    """An id as json: none, one or several."""
    if not ids:
        return None
    return ids[0] if len(ids) == 1 else list(ids)
