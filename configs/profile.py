"""The cost table of whole rounds, over live requests and verified rows.

    python -m experiments.run configs/profile.py --config.drafter=<folder>

Times every program of the engine's ladder (R live requests, T verified rows, and
the plain step of each R) in turn, with drafting, state and planning, and fits
bias + alpha(R) + theta(T). Leaves `cost.json` beside the report, and the flat
form in `cost.flat.json`; which is which: --config.form=flat

The table holds for this target (and its dtype), drafter, device (and processor),
number of drafts and ladder: serve with the same `serve.slots` and `row_buckets`.
On the tiny target (after `configs/tiny.py:dflash`): configs/profile.py:tiny

Time: on the tiny target, 5 minutes with two busy CPU cores, nearly all of it
compiling the 20 programs; 75 seconds when they were compiled before.
Numbers (tiny target, two CPU cores that other work kept 80% busy, so they show the
form and not a speed): every round 5 to 9 ms, whatever R and T, plain step 8 ms, the
additive form within 11% in the median and 40% at worst. On an idle machine the
report says `valid: true`, and only then is a table worth serving with.
"""

from configs import common


def get_config(arg=""):
    config = common.base("profile")
    config.drafter = common.newest_export(f"smollm2-{arg or 'dflash'}")
    config.serve.slots = 8
    config.serve.max_context = 512
    config.serve.max_new_tokens = 96
    config.serve.prefill_buckets = (32, 128)
    if arg == "tiny":
        common.tiny_serving(config)
        config.context = 48
    return config
