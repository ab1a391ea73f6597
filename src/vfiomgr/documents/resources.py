"""The directories templates/ and kata/: in an installed package, or beside src/ in a checkout."""

from __future__ import annotations

import os

_PACKAGE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
_PLACES = (os.path.join(_PACKAGE, "data"), os.path.dirname(os.path.dirname(_PACKAGE)))


def resource_directory(name: str) -> str:
    """The directory `templates` or `kata`.

    Raises:
        FileNotFoundError: the installation is incomplete.

    """
    for place in _PLACES:
        directory = os.path.join(place, name)
        if os.path.isdir(directory):
            return directory
    message = f"{name}/ is missing from this installation of vfiomgr"
    raise FileNotFoundError(message)
