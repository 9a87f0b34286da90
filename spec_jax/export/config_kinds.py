"""Whether what a drafter's `config.json` says has the kinds that its readers take.

Asked before anything is converted or read: a list where an object belongs, or a
number where a text does, is named here and nowhere later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from spec_jax.core.errors import UserError
from spec_jax.core.json_fields import is_number
from spec_jax.export.kinds.base import OWN

_INNER = ("dflash_config", "dspark_config", "eagle_config", "transformer_layer_config")


def check_kinds(config: Mapping[str, Any], where: str) -> None:
    """Refuses a value of another json kind, at the top level or in an inner object.

    A null counts as absent.

    Args:
      config: the json object.
      where: names the folder in errors.

    Raises:
      UserError: naming the key.
    """
    _check(config, where, "")
    for name in _INNER:
        if config.get(name) is not None:
            _check(config[name], where, f"{name}.")


def _check(scope: Mapping[str, Any], where: str, prefix: str) -> None:
    for key, (holds, rule) in _RULES.items():
        found = scope.get(key)
        if found is not None and not holds(found):
            raise UserError(
                f"{where}: config.json has {prefix}{key}={found!r}, which is not "
                f"{rule}; write the value the drafter was trained with"
            )


def _is_object(found: Any) -> bool:
    return isinstance(found, Mapping)


def _is_text(found: Any) -> bool:
    return isinstance(found, str)


def _is_switch(found: Any) -> bool:
    return isinstance(found, bool)


def _is_positive(found: Any) -> bool:
    return is_number(found) and found > 0


def _list_of(kind: type) -> Callable[[Any], bool]:
    def holds(found: Any) -> bool:
        return isinstance(found, list) and all(type(item) is kind for item in found)

    return holds


_OBJECT = (_is_object, "a json object")
_TEXT = (_is_text, "a text")
_TEXTS = (_list_of(str), "a list of texts")
_IDS = (_list_of(int), "a list of whole numbers")
_RULES = {
    **dict.fromkeys((*_INNER, OWN, "rope_parameters", "rope_scaling"), _OBJECT),
    "architectures": _TEXTS,
    "layer_types": _TEXTS,
    "target_layer_ids": _IDS,
    "aux_hidden_state_layer_ids": _IDS,
    "eagle_aux_hidden_state_layer_ids": _IDS,
    "markov_head_type": _TEXT,
    "mask_token": _TEXT,
    "speculators_model_type": _TEXT,
    "enable_confidence_head": (_is_switch, "true or false"),
    "confidence_head_with_markov": (_is_switch, "true or false"),
    "fc_norm": (_is_switch, "true or false"),
    "norm_output": (_is_switch, "true or false"),
    "rms_norm_eps": (_is_positive, "a number above 0"),
    "rope_theta": (_is_positive, "a number above 0"),
    "tie_word_embeddings": (_is_switch, "true or false"),
    "use_aux_norm": (_is_switch, "true or false"),
    "use_sliding_window": (_is_switch, "true or false"),
}
