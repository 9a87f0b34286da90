"""Floor 2: layers, rotary embedding, attention, the draft block backbone."""
