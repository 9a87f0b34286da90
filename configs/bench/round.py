"""Times of one round: plain step, verifies, drafting and what is lost between.

    python -m experiments.run configs/bench/round.py

All programs run in turn in one process, each from the same live context, and
medians are compared. Weights of the drafter are random: a time does not depend
on them. The sampled round uses the sampling values of `serve`.

Time: two minutes on two idle CPU cores, nearly all of it compiling; the second
run loads the compiled programs and takes half a minute.
Numbers (SmolLM2-135M, float32, two cores of an EPYC beside other work): plain
step 27 ms, verify of 8 rows 45 to 53 ms, draft 11 to 16 ms,
`overhead_fraction` below 0.05; no program copies a cache (`cache_copies` 0).
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
