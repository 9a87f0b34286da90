"""The cost table of whole rounds, over live requests and verified rows.

    python -m experiments.run configs/profile.py --config.drafter=<folder>

Times every program of the engine's ladder (R live requests, T verified rows, and
the plain step of each R) in turn, with drafting, state and planning, and fits
bias + alpha(R) + theta(T). Leaves `cost.json` beside the report, and the flat
form in `cost.flat.json`; which is which: --config.form=flat

The table holds for this target, drafter, device, number of drafts and ladder:
serve with the same `serve.slots` and `row_buckets`.
On the tiny target (after `configs/tiny.py:dflash`): configs/profile.py:tiny

Time: to be measured.
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
