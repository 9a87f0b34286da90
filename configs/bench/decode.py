"""Accept length and speed-up of an exported drafter over our plain decoding.

    python -m experiments.run configs/bench/decode.py \\
        --config.bench.prompt_sets.gsm8k=<gsm8k_test.jsonl>

Uses the drafter of the latest finished run of `configs/smollm2.py:dflash`;
another one: --config.drafter=<folder>. A prompt set without a file is left out,
and the report says so.

Time: about a minute for 16 prompts of 128 tokens on two CPU cores.
"""

from configs import common


def get_config(arg=""):
    config = common.base("bench_decode")
    config.drafter = common.newest_export(f"smollm2-{arg or 'dflash'}")
    with config.unlocked():
        config.bench.prompt_sets = {"builtin": "builtin", "gsm8k": ""}
    return config
