"""SmolLM2-135M and the drafter of the decode benchmark.

    python -m experiments.run configs/smollm2.py:dflash \\
        --config.data.prompts=<file.jsonl>

The target answers the file's prompts and prompts of its own making; the drafter
trains on both. The word after the colon names the drafter.

Time: synthesis and capture apart, at most 90 minutes of training on two cores.
Synthesised prompts only: leave --config.data.prompts out.
"""

from configs import common


def get_config(arg=""):
    config = common.base("pipeline", arg or "dflash")
    common.smollm2_drafter(config)
    config.data.num_synth_prompts = 1024
    config.data.max_new_tokens = 192
    config.data.max_tokens = 384
    config.data.held_out = 32
    config.drafter.options.num_layers = 2
    config.drafter.options.num_draft = 7
    config.drafter.options.num_anchors = 40
    config.objective.decay_gamma = 4.0
    config.train.seq_len = 384
    config.train.steps = 6000
    config.train.batch = 6
    config.train.eval_every = 500
    config.train.checkpoint_every = 250
    config.train.eval_prompts = 16
    config.train.max_minutes = 90.0
    return config
