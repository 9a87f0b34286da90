"""The one exception that means "the user's input is wrong, here is the fix"."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input: the message is one sentence naming field, value and fix.

    The command line prints the sentence and exits with code 2; nothing that a
    later run would trust has been written when it is raised.
    """
