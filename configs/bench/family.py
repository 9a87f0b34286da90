"""Every drafter on one text, one feature store and equal supervised positions.

    python -m experiments.run configs/bench/family.py \\
        --config.data.samples=<samples.jsonl> --config.data.prompts=<a.jsonl>,<b.jsonl>

`configs/synthesise.py` makes the samples; prompts of the two files that no sample
answers are decoded, `data.held_out` of each. Without samples the files' other
prompts, and prompts of the target's own making, are answered first. Killed
anywhere, the same command continues; a finished training is not repeated.

Time: two to three hours on two CPU cores, most of it training.

Numbers (1,280 conversations of `configs/synthesise.py`, all but 223 of them GSM8K
training questions; 125,927 answer tokens; 944 to 990 thousand positions each, counted
before positions were exact; eight prompts of each file, 80 tokens; two busy cores, so
that no speed is given; blocks of seven drafts for dflash, too, and a lookup that
stopped at the anchor). Accept length, looping outputs apart; every greedy text equal
to plain decoding:

               GSM8K test          self-instruct
              greedy    T=1        greedy    T=1
    lookup     1.54    1.15         1.87    1.12
    eagle      2.27    1.66         1.26    1.41
    eagle3     1.88    1.47         1.23    1.38
    dflash     1.68    1.33         1.13    1.18
    dspark     1.80    1.41         1.16    1.27
    dflash2    1.82    1.47         1.19    1.27

EAGLE is ahead of EAGLE-3 here because of how positions are counted: EAGLE's million
are a million starts, EAGLE-3's are five depths of 197 thousand. At 292 thousand
starts EAGLE was served at 1.52 on the validation prompts, EAGLE-3 at 197 thousand
at 1.54. Greedy self-instruct answers repeat themselves without looping by the
8-gram rule, which lookup lives on; the drafters saw maths for the most part.

Equal starts instead of equal positions (the ablation of that order):
    --config.positions=0 --config.starts=197000 --config.drafters="('eagle','eagle3')"

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
    config.data.held_out = 16
    config.bench.max_prompts = 12
    config.bench.max_new_tokens = 96
    if name == "tiny":
        config.positions = 20_000
        config.batch = 8
        config.validation_prompts = 4
        config.bench.max_new_tokens = 32
    return config
