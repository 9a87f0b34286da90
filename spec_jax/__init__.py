"""spec_jax: train and serve speculative-decoding drafters in JAX.

Floors, lowest first (a module imports strictly lower floors and its own
folder; `tests/test_floors.py` walks the imports and names the offender):

    0 core   1 config, parallel   2 nn, sampling   3 target
    4 data, drafters   5 objectives, decode   6 train, serve   7 evals, export
    8 experiments (outside this package)
"""
