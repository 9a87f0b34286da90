"""Floor 7: what is measured, and the report a person reads."""
