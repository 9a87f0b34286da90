"""SmolLM2-135M and one drafter of the family, from prompts to an exported folder.

    python -m experiments.run configs/smollm2.py:dflash \\
        --config.data.prompts=<file.jsonl>

The word after the colon names the drafter: eagle, eagle3, dflash, dspark, dflash2,
lookup (which has nothing to train), or a dotted path. The target answers the
file's prompts and prompts of its own making; the drafter trains on both.
Synthesised prompts only: leave --config.data.prompts out.

Several drafters on the same text and features: make the text once with
`configs/synthesise.py`, then give each run
    --config.data.samples=<samples.jsonl> --config.data.folder=<folder>

8,192 of the 49,152 tokens may be proposed; Markov head and selector have rank 32.

Time: synthesis and capture apart, at most 90 minutes of training on two cores.

Numbers of dflash over GSM8K training questions alone,

        --config.data.max_file_prompts=4200 --config.data.num_synth_prompts=0

on two cores that tests also used: 501,721 answer tokens and their features in 63
minutes, 4.5 M supervised positions in 62; served accept length on held-out questions
(64 tokens) 1.88, 2.07, 2.29, 2.38, 2.44 after 600, 1,200, 1,800, 2,400, 3,000 steps,
and 2.24 on test questions with a speed-up of 1.18 (`configs/bench/decode.py`). Text is
what it lives on: 126 thousand answer tokens gave 1.97 after 6.2 M positions, when 97%
of first drafts were right in training and half of them when served.
"""

from configs import common

# Every drafter's features come from these five layer outputs (EAGLE reads the
# last hidden state alone), so that all of them train on one store.
LAYER_IDS = (4, 10, 16, 22, 27)


def get_config(arg=""):
    name = arg or "dflash"
    config = common.base("pipeline", name)
    common.smollm2_drafter(config)
    config.data.num_synth_prompts = 1024
    config.data.max_new_tokens = 128
    config.data.max_tokens = 320
    config.data.held_out = 32
    # Greedy answers: a batch without samplers is decoded faster, too. Those that
    # loop (a third of them) are kept up to where they begin to repeat themselves.
    config.data.greedy_share = 1.0
    config.data.looping = "cut"
    config.objective.teacher_rows = "label"  # greedy: the teacher's argmax is the text
    config.data.mask_id = common.SMOLLM2_MASK_ID
    # float16 holds SmolLM2's largest feature (2.5e4) and halves the store.
    config.capture.dtype = "float16"
    config.capture.batch = 16
    config.capture.layer_ids = LAYER_IDS
    config.capture.teacher = True
    # The head is most of a slot's cost: propose the tokens that answers contain.
    config.drafter.draft_vocab = 8192
    config.objective.decay_gamma = 4.0
    config.train.seq_len = 320
    config.train.batch = 6
    config.train.steps = 6000
    config.train.eval_every = 500
    config.train.checkpoint_every = 250
    config.train.eval_prompts = 16
    config.train.max_minutes = 90.0
    config.serve.prefill_buckets = (32, 64, 96, 128)
    if name in ("dflash", "dspark", "dflash2"):
        # Short blocks, each draft weighed by what it adds to the accepted prefix.
        config.drafter.options.num_layers = 2
        config.drafter.options.num_draft = 5
        config.drafter.options.num_anchors = 53
        config.drafter.options.layer_ids = LAYER_IDS
        config.objective.kind = "dpace"
        config.objective.decay_gamma = 0.0
        config.train.steps = 3000
        config.train.eval_every = 600
    if name == "dspark":
        # The published weights (0.1 and 0.9) stall on little data: the distance
        # between two laws has no gradient where they do not overlap yet.
        config.objective.ce = 1.0
        config.objective.l1 = 0.25
    if name == "eagle":
        config.drafter.options.num_draft = 5
        config.drafter.options.num_starts = 128
        config.objective.decay_gamma = 0.0
    if name == "eagle3":
        config.drafter.options.layer_ids = LAYER_IDS[::2]
        config.drafter.options.num_draft = 5
        config.drafter.options.ttt_length = 5
        config.drafter.options.num_starts = 48
        config.objective.decay_gamma = 4.48  # 0.8 per depth
    return config
