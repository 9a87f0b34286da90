"""Floor 6: the trainer. It never imports `decode`; evaluation is a callback."""
