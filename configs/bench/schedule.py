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
Numbers, so shortened, with a DFlash drafter of five drafts and accept length 2.0, on
two shared cores (valid; medians of three turns, windows 0, 2 and 5, a table that was
there): tokens/s at 1, 4, 16, 32 at once are plain 21.7, 33.4, 87.5, 110; static 16.1,
32.1, 60.6, 75.8; compact 22.1, 35.6, 86.2, 125. Turn by turn, compact over the best
fixed window 0.91, 0.99, 0.97, 1.05; over static 1.20, 1.12, 1.42, 1.65; over plain
0.91, 1.02, 0.99, 1.13; planning 1.2% of a round; predicted round times off by 14%;
texts identical, no compile. Drafting does not pay on this machine at any load: ms of a
round without drafts, with one each and with all, 1 request 37, 52, 66; 4: 83, 120, 140;
16: 125, 240, 295; 32: 203, 388, 551. So the best a plan can do is to stop, and no
window can be beaten by 5%.
"""

from configs import common


def get_config(arg=""):
    config = common.base("bench_schedule")
    config.drafter = common.newest_export(f"smollm2-{arg or 'dspark'}")
    config.plan.newcomers = "mean"
    config.plan.feedback = True
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
