"""Floor 4: prompts, token samples, captured features and the batches made of them."""
