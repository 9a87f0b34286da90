"""Every drafter on one text, one feature store and equal supervised positions.

    python -m experiments.run configs/bench/family.py \\
        --config.data.samples=<samples.jsonl> --config.data.prompts=<a.jsonl>,<b.jsonl>

`configs/synthesise.py` makes the samples; of the prompts of the two files that
no sample answers, `data.held_out` each are held out: the first few choose weights, up
to `bench.max_prompts` of each file are decoded. Without samples the files' other
prompts, and prompts of the target's own making, are answered first. Killed
anywhere, the same command continues; a finished training is not repeated.

Time: on two CPU cores 13 minutes of capture, some 75 of training, 33 of decoding. Parts
of the list (--config.drafters=...) may be trained side by side, all with the same
--config.data.folder=; their folders, moved below one --workdir=, are not trained again.

Numbers (1,280 conversations, all but 223 of them GSM8K training questions; 125,927
answer tokens; 1.01 to 1.03 million positions each; twelve prompts of each file; two
cores, valid). Accept length (speed-up) of non-looping outputs; every greedy text equal
to plain decoding, no near-ties:

               GSM8K test                self-instruct
              greedy       T=1          greedy       T=1
    lookup     1.61 (0.83)  1.24 (0.64)  1.77 (0.92)  1.16 (0.57)
    eagle      2.26 (1.15)  1.95 (0.99)  1.34 (0.68)  1.33 (0.68)
    eagle3     1.87 (0.93)  1.58 (0.78)  1.23 (0.62)  1.26 (0.65)
    dflash     1.77 (0.96)  1.48 (0.80)  1.18 (0.63)  1.23 (0.64)
    dspark     1.83 (0.98)  1.47 (0.78)  1.19 (0.66)  1.18 (0.63)
    dflash2    1.89 (0.89)  1.55 (0.75)  1.24 (0.58)  1.20 (0.59)

Each cell has 260 to 760 rounds, so that differences below 0.07 are chance (DSpark's
and DFlash 2's against DFlash at T=1 are, both ways). The kept selector of DFlash 2 adds
0.04 on the validation prompts (1.571, and 1.528 without). Two orders differ from the
article's:

EAGLE is ahead of EAGLE-3 by how positions are counted: EAGLE's million are a million
starts, EAGLE-3's are five depths of 202 thousand. With as many starts

    --config.positions=0 --config.starts=200000 --config.drafters="('eagle',)"

EAGLE has 1.87 and 1.61 on GSM8K, 1.22 and 1.32 on self-instruct: EAGLE-3's 1.87,
1.58, 1.23, 1.26 but for chance. What depths add is not seen at this size.

Lookup is ahead of all on greedy self-instruct alone: a few answers copy their
prompt (it accepts seven drafts in 7% of rounds there), and of such text the drafters
saw 223 conversations. Over 28 prompts instead of twelve it has 1.49.

The word after the colon is the recipe whose drafters are trained ("smollm2", or
"tiny" for a run of minutes).
"""

import importlib

from configs import common
from spec_jax.core.errors import UserError


def get_config(arg=""):
    name = arg or "smollm2"
    try:
        whole = importlib.import_module(f"configs.{name}").get_config()
    except ModuleNotFoundError:
        whole = None
    if getattr(whole, "task", "") != "pipeline":
        raise UserError(
            f"configs/bench/family.py:{name} names no training recipe; write one there "
            "(smollm2, tiny), and drafters as --config.drafters=\"('eagle',)\""
        )
    config = common.base("bench_family")
    config.recipe = f"configs/{name}.py"
    config.target = whole.target
    config.data = whole.data
    config.capture = whole.capture
    config.serve = whole.serve
    config.serve.slots = 1
    config.data.held_out = 32
    config.bench.max_prompts = 12
    config.bench.max_new_tokens = 80
    if name == "tiny":
        config.data.held_out = 16
        config.positions = 20_000
        config.batch = 8
        config.validation_prompts = 4
        config.bench.max_new_tokens = 32
    return config
