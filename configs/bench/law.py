"""The sampled law of running rounds: drafters x sampling settings x modes.

    python -m experiments.run configs/bench/law.py

A random float32 target of four tokens; the production rounds of many requests
run side by side after four rounds of history; the joint law of the next four
tokens is compared with the exact one, 256 cells, 50,000 samples a case.
Budgets, and with them the cuts, follow the survival of two rounds before, the
first ones planted. Nine biases are planted in turn and must be found.

Time: 40 minutes of one core beside other work: 9 to 30 seconds a case of 50,000
samples, and as long to compile each program.
Numbers: 138 cases (150 since lookup is planned, whose twelve are not among them); the
lowest p is 0.0023, which is 0.32 after Bonferroni's correction (`worst_p`); nothing
impossible was emitted, every way to end a round was seen; nine of nine planted biases
are found, the faintest (a cut that reads its own token) with p 1e-4.
Fewer: --config.samples=10000 --config.drafters="('dspark',)" --config.settings=2
"""

from configs import common


def get_config(arg=""):
    common.takes_no_word("configs/bench/law.py", arg)
    config = common.base("bench_law")
    config.serve.tree_depth = 3
    config.serve.tree_top_k = 2
    config.serve.tree_nodes = 5
    config.serve.tree_parents = (0, 0, 1, 1, 2, 3)
    return config
