"""What made a folder of samples, recorded beside them, so that no other goes on.

Groups of a folder are only added to. A recipe that would make other ones there
is refused with the first value that differs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from spec_jax.core.errors import UserError
from spec_jax.data.files import write_atomically

NAME = "made_by.json"


def claim(
    folder: str,
    facts: Mapping[str, Any],
    *,
    started: bool,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Records in a folder what makes its samples, or compares with the record.

    Args:
      folder: an existing folder.
      facts: everything that changes the samples, by the name a person sets it by,
        as JSON holds it (tuples become lists).
      started: samples are there. Without a record they are taken as they are, and
        that is said: nobody knows what made them.
      say: takes one line.

    Raises:
      UserError: the record differs, with the first name that does, or cannot be
        read.
    """
    path = os.path.join(folder, NAME)
    ours = json.loads(json.dumps(facts))
    try:
        with open(path, encoding="utf-8") as file:
            theirs = dict(json.load(file))
    except FileNotFoundError:
        if started:
            say(f"{folder} does not say what made it ({NAME} is not there): reused")
        else:
            write_atomically(path, json.dumps(ours, indent=1).encode())
        return
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read ({error}); remove the folder, or name another "
            "--workdir="
        ) from error
    for name, value in ours.items():
        if name not in theirs or theirs[name] != value:
            raise UserError(
                f"{folder} was made with {name}={theirs.get(name)!r} and this recipe "
                f"has {value!r}; set it back, or name another --workdir= (or "
                "data.folder)"
            )
