"""A soak of 5,000 requests: joins, aborts, retractions, every program's edges.

    python -m experiments.run configs/bench/soak.py

4,800 requests on a random float32 target of 64 tokens, whose drafter knows its
bigrams, and 200 on SmolLM2. The engine is `compact`, with a cost table and its
planner; what no request made it visit is planted at the end.

Time: 12 minutes of one core (22 beside others); its smallest version takes a minute,
nearly all of it compiling.
Numbers of half of it (--config.requests=2400 --config.real_requests=100, 400 seconds)
with a trained DFlash drafter: 0 wrong of 1,913 greedy answers, no near-tie, 0 compiles
after warm-up, 41 of 41 edges visited, every slot back, seeds reproduced, drafting
switched off 1,660 times, for each of its reasons, 174 stop strings met; resident memory
grows by 7 MB on the random target and by 30 on SmolLM2 (bound 64): passed (ladders had
no program of T = R then, which adds an edge for each R and count). All of it,
before its requests had stop strings and penalties: 0 wrong of 3,721.
Without SmolLM2: --config.real_requests=0
With a trained drafter for SmolLM2: --config.drafter=<exported folder>
"""

from configs import common


def get_config(arg=""):
    common.takes_no_word("configs/bench/soak.py", arg)
    config = common.base("bench_soak")
    config.target.source = common.SMOLLM2
    return config
