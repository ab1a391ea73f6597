"""Where templates/ and kata/ are: inside an installed package, or beside src/ in a checkout."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
_PLACES = (_PACKAGE, _PACKAGE.parent.parent)


def resource_directory(name: str) -> Path:
    """The directory `templates` or `kata`.

    Raises:
        FileNotFoundError: the installation is incomplete.

    """
    for place in _PLACES:
        if (place / name).is_dir():
            return place / name
    message = f"{name}/ is missing from this installation of vfiomgr"
    raise FileNotFoundError(message)
