"""EAGLE-3 (or EAGLE) drafting a chain against dynamic trees of 8, 16 and 32 nodes.

    python -m experiments.run configs/bench/tree.py \\
        --config.bench.prompt_sets.gsm8k=<gsm8k_test.jsonl>

Uses the drafter of the latest finished run of `configs/smollm2.py:eagle3`;
another one: --config.drafter=<folder>. Shape of the trees:
--config.serve.tree_depth=6 --config.serve.tree_top_k=4

Time: ten minutes on two CPU cores.
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
