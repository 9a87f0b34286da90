"""Floor 4: one file per drafter; each is a record of pure functions."""
