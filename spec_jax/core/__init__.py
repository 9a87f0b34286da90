"""Floor 0: records and rules; imports jax, numpy and flax.struct only."""
