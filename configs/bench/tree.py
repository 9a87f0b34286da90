"""EAGLE-3 (or EAGLE) drafting a chain against dynamic trees of 8, 16 and 32 nodes.

    python -m experiments.run configs/bench/tree.py \\
        --config.bench.prompt_sets.gsm8k=<gsm8k_test.jsonl>

Each tree also says what a verify of as many rows costs (`verify_ms`, and over a
plain step `verify_over_plain`), timed before anything is decoded, at
`bench.context` tokens: --config.bench.context=512 --config.serve.max_context=1024

Uses the drafter of the latest finished run of `configs/smollm2.py:eagle3`;
another one: --config.drafter=<folder>. Shape of the trees:
--config.serve.tree_depth=6 --config.serve.tree_top_k=4

Time: ten minutes on two CPU cores.

Numbers (EAGLE-3 of `configs/bench/family.py`, six GSM8K test questions, 64 tokens,
greedy, two idle cores, valid; all texts equal to plain decoding):

                      accept length   verify, ms (over a plain step)   speed-up
    chain of 5 drafts      1.81             53  (1.7)                    0.87
    tree of 8 nodes        2.21             65  (2.1)                    0.77
    16 nodes               2.42             75  (2.4)                    0.76
    32 nodes               2.59            122  (3.9)                    0.52

More rows are not free on a CPU: the chain stays the fastest.
"""

from configs import common


def get_config(arg=""):
    config = common.base("bench_tree")
    config.drafter = common.newest_export(f"smollm2-{arg or 'eagle3'}")
    config.serve.tree_depth = 6
    config.serve.tree_top_k = 8
    with config.unlocked():
        config.bench.prompt_sets = {"builtin": "builtin", "gsm8k": ""}
    config.bench.max_prompts = 8
    config.bench.max_new_tokens = 96
    return config
