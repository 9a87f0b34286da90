"""Drafters of published size for Qwen3-8B: eagle, eagle3, dflash, dspark, dflash2.

    python -m experiments.run configs/qwen3_8b.py:dflash --plan

The word after the colon names the drafter. Layers, ranks, captured layers and
learning rates are those of the public drafters; the data are not (256 prompts,
enough to try the path). `--plan` and `--print_config` need no checkpoint. To
train, put one into a folder named Qwen3-8B, or name it:

        --config.target.source=<folder> --config.data.prompts=<file.jsonl>

Time: not measured; training asks for accelerators, the plan takes seconds.
"""

from configs import common


def get_config(arg=""):
    config = common.base("pipeline", arg or "dflash")
    common.qwen3(config, "Qwen3-8B")
    return config
