"""Floor 3: decoder families, caches, loaders, tokenizer, feature taps."""
