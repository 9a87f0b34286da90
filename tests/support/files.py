"""What lies in a folder, byte by byte."""

import os


def all_files(path):
    """Relative path -> content; a writer's lock does not count."""
    found = {}
    for folder, _, names in os.walk(path):
        for name in set(names) - {".lock"}:
            with open(os.path.join(folder, name), "rb") as file:
                found[os.path.relpath(os.path.join(folder, name), path)] = file.read()
    return found
