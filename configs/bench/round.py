"""Times of one round: plain step, verifies, drafting and what is lost between.

    python -m experiments.run configs/bench/round.py

Weights of the drafter are random: a time does not depend on them. The sampled
round uses the sampling values of `serve`.

Time: a few minutes on two CPU cores.
At another live context: --config.bench.context=1024 --config.serve.max_context=2048
"""

from configs import common


def get_config(arg=""):
    config = common.base("bench_round", arg or "dflash")
    common.smollm2_drafter(config)
    config.drafter.options.num_layers = 2
    config.drafter.options.num_draft = 7
    config.serve.temperature = 1.0
    config.serve.top_p = 0.9
    return config
