"""A workload file through the engine, with a record of every request and round.

    python -m experiments.run configs/serve_offline.py --config.drafter=<folder>

The workload's lines say when each request arrives, its prompt, sampling, stop
strings, seed and whether it may speculate; the default is a mixture of our own
(`configs/workloads/mixed.jsonl`: maths, chat, long texts). Leaves
`requests.jsonl` and `rounds.jsonl` beside the report.

Budgets instead of full windows, with what `configs/profile.py` and
`configs/calibrate.py` measured for this very drafter:

    --config.mode=compact --config.cost=<cost.json> --config.sts=<sts.json>

(several STS files, one for each sampling regime: <a.json>,<b.json>; the first one's
temperatures are for requests of any other regime, too)

Its limits are the `plan` section: --config.plan.max_verify_len=4
--config.plan.align_rows=True --config.plan.extra_lag=1

What a budget would lose, at the cost of full windows: --config.mode=cap_accept
All requests at once: --config.pace=fast
Plainly: --config.drafter=
On the tiny target (after `configs/tiny.py:dflash`): configs/serve_offline.py:tiny

Time: on the tiny target, 4 seconds of serving after one minute (`static`) to five
(`compact`, more programs) of compiling with two busy CPU cores.
Numbers (tiny target, 48 requests, four slots, two CPU cores that other work kept 80%
busy): 1,545 tokens in 272 rounds, accept length 1.54, static and compact alike:
by a table measured on that busy machine a row costs nothing, so that every budget
is a full one. No compiles after
warm-up, planning 2.4% of the time of 8 ms rounds, nothing late.
"""

from configs import common


def get_config(arg=""):
    config = common.base("serve_offline")
    config.drafter = common.newest_export(f"smollm2-{arg or 'dflash'}")
    config.serve.slots = 8
    config.serve.max_context = 640
    config.serve.max_new_tokens = 96
    config.serve.prefill_buckets = (32, 128)
    if arg == "tiny":
        common.tiny_serving(config)
        config.workload = "configs/workloads/tiny.jsonl"
    return config
