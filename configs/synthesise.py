"""Training text as one file: prompts, and the target's own answers to them.

    python -m experiments.run configs/synthesise.py \\
        --config.data.prompts=<file.jsonl>[,<file.jsonl>]

Writes `samples.jsonl` into the run's folder; give it to any number of runs with
--config.data.samples=<file>. Killed anywhere, the same command continues. How many
prompts: --config.data.max_file_prompts=1900 --config.data.num_synth_prompts=400

Time: 100 to 200 answer tokens a second on two CPU cores; 2,300 prompts take half an
hour to an hour.
"""

from configs import common, smollm2


def get_config(arg=""):
    common.takes_no_word("configs/synthesise.py", arg)
    config = common.base("synthesise")
    config.target.source = common.SMOLLM2
    whole = smollm2.get_config()
    config.data = whole.data
    config.serve = whole.serve
    return config
