"""Plain decoding, fixed windows and planned budgets at 1, 4, 16, 32 requests.

    python -m experiments.run configs/bench/schedule.py \\
        --config.drafter=<exported drafter> \\
        --config.bench.prompt_sets.gsm8k=<gsm8k_test.jsonl> \\
        --config.bench.prompt_sets.self_instruct=<self_instruct.jsonl>

Uses the drafter of the latest finished run of `configs/smollm2.py:dspark`, if
none is named. A prompt set without a file is left out; `long` is the project's own
mixture with its long texts, or any text file, which is cut into long prompts
(--config.bench.prompt_sets.long=<book.txt>).

Temperatures and the cost table are made first, in the programs that are then
measured, on prompts that are not; both lie beside the report (`sts.json`,
`cost.json`) and can be given to another run of the same shapes:

    --config.sts=<sts.json> --config.cost=<cost.json>

Fewer fixed windows: --config.windows="(0,1,3,7)"
A request that is new counts what the others had on average (answers are short here);
the article's way is --config.plan.newcomers=optimistic
A share of sampled requests: --config.sampled_share=0.25 --config.serve.temperature=0.7
On the tiny target (after `configs/tiny.py:dspark`): configs/bench/schedule.py:tiny

Time: on SmolLM2 and two CPU cores whose plain step takes 37 ms, 14 minutes of compiling
and cost table, then 20 seconds to two minutes for each way, load and turn: an hour and
a half as it stands. Shorter: --config.requests="(4,8,24,40)"
--config.bench.max_new_tokens=48 --config.bench.repeats=2 (39 minutes). `:tiny` takes
70 seconds on two idle CPU cores, nearly all of it compiling; its rounds of 0.8 ms are
the host's time more than the programs', so that its numbers show the form of the
report and no speed.
Looking again while drafting is stopped may cost 3% of the plain time here
(--config.plan.probe_share, with probe_every 1).
Numbers, shortened further (--config.windows="(0,2,5)", two turns; two cores, valid).
Lookup, --config.serve.num_draft=5 --config.concurrency="(1,2,4,16,32)"
--config.requests="(6,8,12,24,40)", 64 tokens, 34 minutes: tokens/s at those loads are
plain 29.0, 39.3, 52.5, 114, 152; static 28.6, 36.4, 50.8, 84, 108; compact 31.5, 39.6,
52.5, 113, 151. Compact over the best fixed window 1.06, 1.01, 1.00, 0.95, 1.00; over
static 1.10, 1.09, 1.03, 1.34, 1.40; over plain 1.09, 1.01, 1.00, 0.99, 1.00; planning
0.9% of a round; rounds that draft predicted within 5%; texts identical, no compile.
Looking again after each plain round (probe_share=0; feedback was then of the device's
survival): 1.07, 1.09, 1.00, 0.93, 0.92 of the best fixed window.
The DFlash drafter of `configs/smollm2.py:dflash` (accept length 2.24 on GSM8K alone;
probe_every=64, loads 1, 4, 16, 32, 48 tokens): 1.00, 0.94, 0.91, 1.08 of the best fixed
window; 1.13, 1.09, 1.05, 1.62 of static. Its drafts pay for 18% of rounds when a
request is alone and at no other load: rounds without drafts, with one each and with all
took 36, 46, 63 ms for one request, 64, 95, 125 for four, 128, 251, 328 for sixteen.
"""

from configs import common


def get_config(arg=""):
    config = common.base("bench_schedule")
    config.drafter = common.newest_export(f"smollm2-{arg or 'dspark'}")
    config.plan.newcomers = "mean"
    config.plan.feedback = True
    config.plan.probe_every = 1
    config.plan.probe_share = 0.03
    config.serve.max_context = 512
    config.serve.prefill_buckets = (32, 128)
    with config.unlocked():
        config.bench.prompt_sets = {
            "gsm8k": "",
            "self_instruct": "",
            "long": "configs/workloads/mixed.jsonl",
        }
    if arg == "tiny":
        common.tiny_serving(config)
        config.drafter = common.newest_export("tiny-dspark")
        config.concurrency = (1, 4)
        config.requests = (8, 20)
        config.row_buckets = 2
        config.windows = (0, 1, 4)
        config.cost_repeats = 8
        config.fit_slots = 4
        config.bench.repeats = 2
        config.bench.context = 48
        config.bench.max_new_tokens = 48
        with config.unlocked():
            config.bench.prompt_sets = {"tiny": "configs/workloads/tiny.jsonl"}
    return config
