"""`config.json` of a drafter with a value of another json kind: one sentence."""

import json
import math

import pytest
import safetensors.numpy

from spec_jax.core.errors import UserError
from spec_jax.export import converters, registry, shared, storage
from spec_jax.export.config_kinds import check_kinds

from .conftest import SPEC

# Values of every json kind, and numbers at their edges.
VALUES = (0, -1, 1.5, 10**30, math.nan, True, "x", [], [None], ["x"], {}, {"a": 1})
INNER = ("dflash_config", "dspark_config", "eagle_config", "spec_jax")
OBJECTS = (*INNER, "rope_parameters", "rope_scaling")
ELSEWHERE = (
    *OBJECTS,
    "bias",
    "draft_vocab_size",
    "eagle_aux_hidden_state_layer_ids",
    "fc_norm",
    "is_causal",
    "layer_types",
    "norm_output",
    "sample_from_anchor",
    "sliding_window",
    "speculators_model_type",
    "transformer_layer_config",
    "use_aux_norm",
)


def made_from(config, tensors, tokenizer):
    """What `read_folder` does with a configuration, without a forward."""
    check_kinds(config, "there")
    config, tensors, _ = converters.adopt(config, tensors, SPEC, "there")
    form = registry.form_named(config, "there")
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    options, _ = form.from_config(config, "there", shapes, SPEC, tokenizer)
    return shared.make_drafter(form.name, options, SPEC)


def speculators(config):
    """The same settings, nested as that package nests them."""
    inner = {k: v for k, v in config.items() if k not in INNER}
    return {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": inner,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
    }


@pytest.fixture(params=["eagle", "eagle3", "dflash", "dspark", "dflash2", "other"])
def stored(request, whole_of):
    """(config, tensors) of a folder of each kind, and of another package's."""
    path = whole_of("eagle3" if request.param == "other" else request.param)
    config = json.loads((path / storage.CONFIG).read_text())
    if request.param == "other":
        config = speculators(config)
    return config, safetensors.numpy.load_file(path / storage.WEIGHTS)


def places(config):
    """Paths of what the configuration says, and of what it could."""
    yield from ((key,) for key in {*config, *ELSEWHERE})
    for name in (*OBJECTS, "transformer_layer_config"):
        if isinstance(config.get(name), dict):
            yield from ((name, key) for key in {*config[name], "mask_token"})


def changed(config, place, value):
    config = json.loads(json.dumps(config))
    inner = config
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    return config


def test_a_value_of_another_kind_is_a_sentence(stored, target):
    config, tensors = stored
    made_from(config, tensors, target.tokenizer)
    for place in places(config):
        for value in VALUES:
            new = changed(config, place, value)
            try:
                made_from(new, tensors, target.tokenizer)
            except UserError as error:
                assert "\n" not in str(error)
            except Exception as error:
                pytest.fail(f"{'.'.join(place)}={value!r}: {error!r}")


@pytest.mark.parametrize("value", [v for v in VALUES if not isinstance(v, dict)])
@pytest.mark.parametrize("key", OBJECTS)
def test_objects_are_named(key, value, whole_of, target):
    path = whole_of("dflash")
    config = json.loads((path / storage.CONFIG).read_text()) | {key: value}
    tensors = safetensors.numpy.load_file(path / storage.WEIGHTS)
    with pytest.raises(UserError, match=f"has {key}=.* is not a json object"):
        made_from(config, tensors, target.tokenizer)


def test_layers_that_nothing_holds_are_not_counted(whole_of, target):
    path = whole_of("dflash")
    config = json.loads((path / storage.CONFIG).read_text())
    tensors = safetensors.numpy.load_file(path / storage.WEIGHTS)
    config |= {"num_hidden_layers": 2**50, "layer_types": None}
    with pytest.raises(UserError, match="num_hidden_layers=.* does not fit"):
        made_from(config, tensors, target.tokenizer)


def test_options_of_our_own_form_have_their_kinds(target):
    config = {"architectures": ["SpecJaxDrafter"]}
    for options in ({"num_draft": "x"}, {"num_draft": None}, {"nope": 1}, [1], None):
        own = {"drafter": "lookup", "options": options}
        with pytest.raises(UserError, match="lookup|spec_jax.options.num_draft"):
            made_from(config | {"spec_jax": own}, {}, target.tokenizer)
