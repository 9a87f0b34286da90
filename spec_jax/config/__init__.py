"""Floor 1: the frozen schema of a recipe and the strict way into it."""
