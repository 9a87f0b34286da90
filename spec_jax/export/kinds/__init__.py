"""One module per kind of drafter: its public names and its `config.json`."""
