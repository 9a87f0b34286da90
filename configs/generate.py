"""One prompt, streamed to the terminal; accepted drafts are marked with colour.

    python -m experiments.run configs/generate.py \\
        --config.prompt="Why is the sky blue?" --config.drafter=<folder>

The folder is what a training run exported (`runs/<recipe>-<hash>/export`).
Without one the same engine decodes plainly, to compare.

Time: seconds.
Sampled instead of greedy: --config.serve.temperature=0.7
"""

from configs import common


def get_config(arg=""):
    del arg
    config = common.base("generate")
    config.prompt = "Explain in two sentences why the sky is blue."
    return config
