"""Floor 5: one round as pure stages, composed and compiled; the slot engine."""
