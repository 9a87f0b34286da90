"""Why is this drafter accepted so rarely? Names the first thing that differs.

    python -m experiments.run configs/why.py \\
        --config.drafter=<folder> --config.prompt="Why is the sky blue?"

Compares training and serving of an exported drafter in forward order: contract,
template, visibility, features, logits, weights, draft state, served. Prints a
table and one sentence, and leaves `report.json`. Exit codes: 0 all agree, 1
something differs, 2 wrong input.

Serve as the server does: --config.system="..." --config.thinking=True, or
--config.raw=True for prompts without the chat template.

Time: about a minute on two CPU cores for SmolLM2, most of it compiling.
"""

from configs import common


def get_config(arg=""):
    common.takes_no_word("configs/why.py", arg)
    config = common.base("why")
    config.prompt = "Explain in two sentences why the sky is blue."
    return config
