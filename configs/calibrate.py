"""Temperatures for a drafter's confidence, one file per sampling regime.

    python -m experiments.run configs/calibrate.py --config.drafter=<folder>

Decodes held-out prompts with full windows, keeps each round's raw confidence and
its raw accepted drafts, and fits one temperature per draft position so that the
survival of a draft says how often it is reached. Leaves `sts.json` beside the
report. The regime is what `serve` says:

    --config.serve.temperature=0.7 --config.serve.top_p=0.9

On the tiny target (after `configs/tiny.py:dflash`): configs/calibrate.py:tiny

Time: to be measured.
"""

from configs import common


def get_config(arg=""):
    config = common.base("calibrate")
    config.drafter = common.newest_export(f"smollm2-{arg or 'dflash'}")
    config.serve.prefill_buckets = (32, 128)
    if arg == "tiny":
        common.tiny_serving(config)
        config.prompts = "configs/workloads/tiny.jsonl"
    return config
