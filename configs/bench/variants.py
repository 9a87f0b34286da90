"""One exported drafter, served in several ways: accept lengths side by side.

    python -m experiments.run configs/bench/variants.py \\
        --config.bench.prompt_sets.gsm8k=<gsm8k_test.jsonl>

Each variant is decoded at temperatures 0, 0.7 and 1:

    as_is          drafts drawn from q, features as the target computes them
    one_hot        the likeliest drafts, q one-hot, whatever the temperature
    bfloat16, float8_e4m3, int8
                   features rounded before the drafter reads them (float8 without a
                   scale, int8 with one per row); the table says which type the
                   drafter was trained on
    with_use_selector, without_use_selector
                   of DFlash 2: the one that its folder does not serve

What a drafter cannot do is left out, and the report says so. Where 0 is among
`temperatures`, every greedy text is compared with plain decoding. Nothing is timed, so
a busy machine is no harm.

Uses the drafter of the latest finished run of `configs/smollm2.py:dflash2`;
another one: `configs/bench/variants.py:dflash`, or --config.drafter=<folder>.

Time: some twenty minutes for 8 prompts of 64 tokens on two CPU cores.
Numbers: not measured yet.
"""

from configs import common


def get_config(arg=""):
    config = common.base("bench_variants")
    config.drafter = common.newest_export(f"smollm2-{arg or 'dflash2'}")
    with config.unlocked():
        config.bench.prompt_sets = {"builtin": "builtin", "gsm8k": ""}
    config.bench.max_prompts = 8
    config.bench.max_new_tokens = 64
    config.max_load = 1.0
    return config
