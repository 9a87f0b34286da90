"""SmolLM2-135M and a DFlash drafter, start to finish; what `make demo` runs.

    python -m experiments.run

Another drafter of the family: configs/quickstart.py:eagle3 (eagle, dspark, dflash2;
lookup has nothing to train).

Synthesises prompts, lets the target answer them and keeps its features meanwhile,
trains a small drafter for a few minutes, exports it, loads the folder again and decodes
held-out prompts with and without it.

Time: at most 10 minutes on two idle CPU cores (9.5 measured, compiling included, where
a plain step takes 37 ms; a minute less where it takes 24).
Numbers there: accept length 1.40 (1.03 with shuffled features), texts identical, no
compile after warm-up, loss 15.8 -> 1.6, speed-up 0.81: a first drafter of 5 M
parameters does not pay for a verify that costs 1.5 plain steps; accept length does.
Another length of training: --config.train.steps=400
Prompts of your own: --config.data.prompts=<file.jsonl>
"""

from configs import common


def get_config(arg=""):
    name = arg or "dflash"
    config = common.base("pipeline", name)
    common.smollm2_drafter(config)
    # A narrow task: a drafter of 5 M parameters learns it in minutes.
    config.data.synth_openings = ("Write a short story about", "Tell me a story about")
    config.data.num_synth_prompts = 170
    config.data.synth_max_tokens = 32
    config.data.max_new_tokens = 96
    config.data.max_tokens = 192
    config.data.held_out = 10
    config.data.greedy_share = 1.0
    # Of greedy text every label is the target's favourite.
    config.objective.teacher_rows = "label"
    config.drafter.draft_vocab = 4096
    common.set_options(
        config, num_layers=1, num_draft=3, ttt_length=3, num_anchors=32, num_starts=32
    )
    config.objective.decay_gamma = 4.48 if name == "eagle3" else 4.0
    if name == "eagle":  # a start is one position, not a block of them
        config.drafter.options.num_starts = 96
    if name == "dspark":  # the published weights stall on little data
        config.objective.ce = 1.0
        config.objective.l1 = 0.25
    config.train.seq_len = 192
    config.train.batch = 8
    config.train.steps = 400
    config.train.eval_every = 200
    config.train.checkpoint_every = 200
    config.train.eval_prompts = 4
    config.serve.max_context = 256
    config.serve.prefill_buckets = (32, 64)
    config.serve.max_new_tokens = 96
    return config
