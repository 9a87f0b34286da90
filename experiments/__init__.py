"""Floor 8: one thin module per task; `python -m experiments.run` is the way in."""
