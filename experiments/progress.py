"""Progress lines of a run."""

import rich.console


def say(text: str) -> None:
    """One progress line, as it is: brackets are no markup."""
    rich.console.Console(soft_wrap=True, highlight=False).print(text, markup=False)
