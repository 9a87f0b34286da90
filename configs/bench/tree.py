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
greedy, two busy cores, so that times mean little): accept length 1.79 of the chain of
5 drafts, 2.17, 2.38 and 2.55 of trees of 8, 16 and 32; all texts equal to plain
decoding. A round costs 2.4, 3.2, 3.3 and 6.2 plain steps there: more rows are not
free on a CPU, and the chain stays the fastest.
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
