"""Temperatures for a drafter's confidence, one file per sampling regime.

    python -m experiments.run configs/calibrate.py --config.drafter=<folder>

Decodes held-out prompts with full windows, keeps each round's raw confidence and
its raw accepted drafts, and fits one temperature per draft position so that the
survival of a draft says how often it is reached. Leaves `sts.json` beside the
report. The regime is what `serve` says:

    --config.serve.temperature=0.7 --config.serve.top_p=0.9

On the tiny target (after `configs/tiny.py:dflash`): configs/calibrate.py:tiny

Time: 45 seconds on the tiny target with two busy CPU cores, all but three of it
compiling and loading.
Numbers (tiny target, its drafter of `configs/tiny.py:dflash`, 48 prompts, temperature
0.8, top-p 0.9): 1,048 rounds, temperatures 1.0, 1.0, 0.89, 2.0, mean calibration
error 0.0215 before and 0.0206 after. This drafter is nearly calibrated as it is, and
its first position cannot be helped by a temperature.
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
