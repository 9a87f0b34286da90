"""What tests share: oracles, tiny targets and batches, a greedy draw."""
