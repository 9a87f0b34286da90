"""SmolLM2-135M and a DFlash drafter, start to finish; what `make demo` runs.

    python -m experiments.run

Synthesises prompts, lets the target answer them, captures its features, trains
a small drafter for a few minutes, exports it, loads the folder again and decodes
held-out prompts with and without it.

Time: at most 10 minutes on two idle CPU cores.
Another length of training: --config.train.steps=400
Prompts of your own: --config.data.prompts=<file.jsonl>
"""

from configs import common


def get_config(arg=""):
    config = common.base("pipeline", arg or "dflash")
    common.smollm2_drafter(config)
    config.data.num_synth_prompts = 160
    config.data.max_new_tokens = 96
    config.data.max_tokens = 224
    config.data.held_out = 12
    config.drafter.options.num_layers = 1
    config.drafter.options.num_draft = 4
    config.drafter.options.num_anchors = 16
    config.train.seq_len = 224
    config.train.steps = 240
    config.train.eval_every = 120
    config.train.checkpoint_every = 120
    config.train.eval_prompts = 4
    config.serve.max_context = 384
    config.serve.prefill_buckets = (64, 128)
    config.serve.max_new_tokens = 96
    return config
