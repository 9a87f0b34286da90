"""Our plain decoding beside transformers': same prompts, same float32 weights.

    make parity        (installs torch apart, then runs this)
    python -m experiments.run configs/bench/peers.py

The target is written as a Hugging Face folder and read back by transformers.
Each prompt is decoded greedily by both in alternating order, prefill included,
every answer in full length, on the same number of threads.

Time: a few minutes on two CPU cores.
Numbers (SmolLM2-135M, float32, two idle cores, transformers 5.24, torch 2.13): ours
40.9 tokens/s, theirs 17.7, `plain_over_transformers` 2.31, all texts equal.
More threads for both: --config.bench.threads=4
"""

from configs import common


def get_config(arg=""):
    common.takes_no_word("configs/bench/peers.py", arg)
    config = common.base("bench_peers")
    config.bench.max_prompts = 8
    config.bench.max_new_tokens = 64
    config.bench.repeats = 3
    config.bench.warmup = 1
    return config
