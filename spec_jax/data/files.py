"""Files that appear whole or not at all, and the checksum of one."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets

# Prefix of files that were being written; a killed process leaves them.
TEMPORARY = ".writing-"


def write_atomically(path: str, content: bytes) -> None:
    """Writes `content` under a temporary name, syncs it, renames it to `path`."""
    folder = os.path.dirname(path) or "."
    temporary = os.path.join(folder, f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync_folder(folder)


def sync_folder(folder: str) -> None:
    """Makes renames inside `folder` survive a power loss."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: str) -> str:
    """sha256 of a file, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_temporaries(folder: str) -> None:
    """Removes what killed writers left; only for a folder's one writer."""
    for name in os.listdir(folder):
        if name.startswith(TEMPORARY):
            os.unlink(os.path.join(folder, name))
