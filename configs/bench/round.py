"""Times of one round: plain step, verifies, drafting and what is lost between.

    python -m experiments.run configs/bench/round.py

All programs run in turn in one process, each from the same live context, and
medians are compared. Weights of the drafter are random: a time does not depend
on them. The sampled round uses the sampling values of `serve`.

Time: two minutes on two idle CPU cores, nearly all of it compiling; the second
run loads the compiled programs and takes half a minute.
Numbers (SmolLM2-135M, float32, two idle cores of an EPYC, context 256): plain step
24.1 ms; verify of 1, 2, 4, 8, 16 rows 24.3, 36.4, 37.0, 43.5, 57.0 ms, so
`verify8_over_plain` 1.80: a matrix-vector product reads the weights once, while
XLA's thin matrix products here cost 12 ms more from the second row on. Draft
11.3 ms with the whole vocabulary; `overhead_fraction` -0.00 greedy and 0.04
sampled; no program copies a cache (`cache_copies` 0).
Another drafter: configs/bench/round.py:eagle3 (eagle, dspark, dflash2, lookup).
With a reduced vocabulary: --config.drafter.draft_vocab=8192 (draft 4.4 ms).
On two idle cores of a Xeon, with that, --config.drafter.options.num_draft=5 and
--config.bench.context=176: plain step 34.3 ms, verify of 2, 4, 6, 8, 16 rows 40, 53,
54, 63, 75 ms, draft 6.5 (its trunk 4.4), draft state 2.0, round 65.5;
`overhead_fraction` 0.07 greedy and 0.14 sampled. The others, so (lookup without a
vocabulary; ms of plain step, draft, its trunk and vocabulary, draft state, round):
    lookup    31.2   0.4  (0.3, 0.1)   0.3  55.3
    dspark    30.2   5.7  (3.9, 1.8)   1.8  57.2
    dflash2   32.2  15.5  (5.3, 10.2)  2.0  69.9
    eagle     37.3  10.4  (5.9, 4.5)   2.9  70.6
    eagle3    35.8  10.9  (6.1, 4.9)   3.6  73.3
At another live context: --config.bench.context=1024 --config.serve.max_context=2048
"""

from configs import common


def get_config(arg=""):
    config = common.base("bench_round", arg or "dflash")
    common.smollm2_drafter(config)
    common.set_options(config, num_layers=2, num_draft=7)
    config.serve.temperature = 1.0
    config.serve.top_p = 0.9
    return config
