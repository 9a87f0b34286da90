"""Progress lines of a run."""

import rich.console


def say(text: str) -> None:
    """One progress line."""
    rich.console.Console(soft_wrap=True, highlight=False).print(text)
