"""The sampled law of running rounds: drafters x sampling settings x modes.

    python -m experiments.run configs/bench/law.py

A random float32 target of four tokens; the production rounds of many requests
run side by side after four rounds of history; the joint law of the next four
tokens is compared with the exact one, 256 cells, 50,000 samples a case.
Budgets, and with them the cuts, follow the survival of two rounds before, the
first ones planted. Nine biases are planted in turn and must be found.

Time: 11 to 14 seconds a case of 20,000 samples on two busy CPU cores; a full run (144
cases and nine biases) has not been timed yet.
Fewer: --config.samples=10000 --config.drafters="('dspark',)" --config.settings=2
"""

from configs import common


def get_config(arg=""):
    del arg
    config = common.base("bench_law")
    config.serve.tree_depth = 3
    config.serve.tree_top_k = 2
    config.serve.tree_nodes = 5
    config.serve.tree_parents = (0, 0, 1, 1, 2, 3)
    return config
