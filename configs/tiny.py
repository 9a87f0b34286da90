"""The whole walk on a tiny target, offline.

    python -m experiments.run configs/tiny.py:dflash

The target is a random model of five layers that first learns a synthetic
corpus for some seconds; then everything happens as with a real one. The word
after the colon names the drafter: eagle, eagle3, dflash, dspark, dflash2, lookup.

Time: under 60 seconds on two CPU cores (52 cold, 11 with programs compiled before).
Numbers there: accept length 1.70 (1.09 with shuffled features), speed-up 1.26.
Look at the training data: --inspect
"""

from configs import common


def get_config(arg=""):
    name = arg or "dflash"
    config = common.base("pipeline", name)
    config.target.source = "tiny"
    config.data.num_synth_prompts = 96
    config.data.synth_max_tokens = 24
    config.data.max_new_tokens = 48
    config.data.max_tokens = 96
    config.data.held_out = 8
    config.capture.batch = 16
    common.set_options(config, num_draft=4, num_layers=1, num_anchors=12, num_starts=24)
    if name == "dspark":
        config.objective.ce = 1.0
        config.objective.l1 = 0.25
    config.train.seq_len = 96
    config.train.batch = 8
    config.train.steps = 200
    config.train.eval_every = 100
    config.train.checkpoint_every = 100
    config.train.eval_new_tokens = 32
    config.serve.max_context = 160
    config.serve.prefill_buckets = (64,)
    config.serve.max_new_tokens = 48
    return config
