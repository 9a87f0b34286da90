"""Accept length and speed-up of an exported drafter over our plain decoding.

    python -m experiments.run configs/bench/decode.py \\
        --config.bench.prompt_sets.gsm8k=<gsm8k_test.jsonl>

Uses the drafter of the latest finished run of `configs/smollm2.py:dflash`;
another one: --config.drafter=<folder>. A prompt set without a file is left out,
and the report says so.

Time: three minutes for 24 prompts of 128 tokens on two CPU cores.
Numbers (the drafter of the run that `configs/smollm2.py` tells of, 16 GSM8K test
questions, greedy, two idle cores whose plain step takes 36 ms): accept length 2.24
(looping outputs, a quarter, 2.34), first draft accepted in 58% of rounds, speed-up
1.18, texts identical, no near-ties. Behind the text's own tokens (`teacher_forced`)
67% of first drafts are right, and 75% in training. A round of six rows costs 1.9
plain steps on that machine, which bounds the speed-up. The quickstart's drafter, which
saw 14,400 synthesised tokens for minutes, gets 1.12 there.
"""

from configs import common


def get_config(arg=""):
    config = common.base("bench_decode")
    config.drafter = common.newest_export(f"smollm2-{arg or 'dflash'}")
    with config.unlocked():
        config.bench.prompt_sets = {"builtin": "builtin", "gsm8k": ""}
    return config
