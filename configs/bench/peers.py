"""Our plain decoding beside transformers': same prompts, same float32 weights.

    make parity        (installs torch apart, then runs this)
    python -m experiments.run configs/bench/peers.py

Time: a few minutes on two CPU cores.
More threads for both: --config.bench.threads=4
"""

from configs import common


def get_config(arg=""):
    del arg
    config = common.base("bench_peers")
    config.bench.max_prompts = 8
    return config
