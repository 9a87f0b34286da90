"""Accept length and speed-up of an exported drafter over our plain decoding.

    python -m experiments.run configs/bench/decode.py \\
        --config.bench.prompt_sets.gsm8k=<gsm8k_test.jsonl>

Uses the drafter of the latest finished run of `configs/smollm2.py:dflash`;
another one: --config.drafter=<folder>. A prompt set without a file is left out,
and the report says so.

Time: three minutes for 24 prompts of 128 tokens on two CPU cores.
Numbers (drafter of the run named in `configs/smollm2.py`, 24 GSM8K test questions,
greedy, two idle cores): accept length 1.79 (looping outputs, a quarter, 1.80), first
draft accepted in 45% of rounds, plain step 23.8 ms, speed-up 0.90, texts identical.
A narrower window pays here: --config.serve.num_draft=3 gives 1.76 tokens a round and
a speed-up of 1.01 over 12 of those questions.

Of the 90-minute run in that file (five drafts, 16 prompts a set, two idle cores whose
plain step takes 38 ms): accept length 1.97 (looping 2.02) on GSM8K test, first draft
accepted in 51% of rounds, speed-up 1.03; on our own prompts 2.02 and 1.01. Texts
identical, no near-ties.
"""

from configs import common


def get_config(arg=""):
    config = common.base("bench_decode")
    config.drafter = common.newest_export(f"smollm2-{arg or 'dflash'}")
    with config.unlocked():
        config.bench.prompt_sets = {"builtin": "builtin", "gsm8k": ""}
    return config
