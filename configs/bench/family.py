"""Every drafter on one text, one feature store and equal supervised positions.

    python -m experiments.run configs/bench/family.py \\
        --config.data.samples=<samples.jsonl> --config.data.prompts=<a.jsonl>,<b.jsonl>

`configs/synthesise.py` makes the samples; prompts of the two files that no sample
answers are decoded, `data.held_out` of each. Without samples the files' other
prompts, and prompts of the target's own making, are answered first. Killed
anywhere, the same command continues; a finished training is not repeated.

Time: two to three hours on two CPU cores, most of it training.

The word after the colon is the recipe whose drafters are trained ("smollm2", or
"tiny" for a run of minutes).
"""

import importlib

from configs import common


def get_config(arg=""):
    name = arg or "smollm2"
    whole = importlib.import_module(f"configs.{name}").get_config()
    config = common.base("bench_family")
    config.recipe = f"configs/{name}.py"
    config.target = whole.target
    config.data = whole.data
    config.capture = whole.capture
    config.serve = whole.serve
    config.serve.slots = 1
    config.data.held_out = 16
    config.bench.max_prompts = 12
    config.bench.max_new_tokens = 96
    if name == "tiny":
        config.positions = 20_000
        config.validation_prompts = 4
        config.bench.max_new_tokens = 32
        config.data.mask_id = -1
    return config
