"""Floor 2: the one transform from logits to a law, and draws from it."""
