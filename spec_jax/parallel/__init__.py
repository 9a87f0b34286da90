"""Floor 1: the mesh, its axis rules and multi-process start."""
