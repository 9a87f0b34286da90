"""One prompt, streamed to the terminal; accepted drafts are marked with colour.

    python -m experiments.run configs/generate.py \\
        --config.prompt="Why is the sky blue?" --config.drafter=<folder>

The folder is what a training run exported (`runs/<recipe>-<hash>/export`).
Without one the same engine decodes plainly, to compare. Accepted drafts are
green, what the target chose is not; the last line says what it was worth.

Time: the first start compiles for half a minute on two CPU cores; later ones
take about ten seconds, then some 35 tokens/s plainly.
Colour also into a pipe: --config.colour=always
Sampled instead of greedy: --config.serve.temperature=0.7
"""

from configs import common


def get_config(arg=""):
    common.takes_no_word("configs/generate.py", arg)
    config = common.base("generate")
    config.prompt = "Explain in two sentences why the sky is blue."
    return config
