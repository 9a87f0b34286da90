"""Which form a drafter is written in, and which one a `config.json` is of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spec_jax.core.errors import UserError
from spec_jax.drafters.base import Drafter
from spec_jax.export.kinds import dflash, dflash2, dspark, eagle, eagle3, own
from spec_jax.export.kinds.base import Form

FORMS = {
    form.name: form
    for form in (eagle.FORM, eagle3.FORM, dflash.FORM, dspark.FORM, dflash2.FORM)
}
_BY_ARCHITECTURE = {
    name: form for form in FORMS.values() for name in form.architectures
}


def form_of(drafter: Drafter) -> Form:
    """The public form of a drafter, or our own where it has none."""
    path = own.path_of(drafter)
    return FORMS.get(path) or own.form(path)


def form_named(config: Mapping[str, Any], where: str) -> Form:
    """The form that a `config.json` is of.

    Raises:
      UserError: it names none that is read here.
    """
    found = config.get("architectures")
    if found == [own.ARCHITECTURE]:
        return own.form(own.path_in(config, where))
    if isinstance(found, list) and len(found) == 1 and found[0] in _BY_ARCHITECTURE:
        return _BY_ARCHITECTURE[found[0]]
    raise UserError(
        f"{where}: architectures is {found!r}, expected one of "
        f"{', '.join(sorted(_BY_ARCHITECTURE))}; other drafters are not read here"
    )
