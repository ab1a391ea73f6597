"""Documents as text: JSON, or YAML 1.2."""

from __future__ import annotations

from typing import Any

from vfiomgr.errors import InvalidDocument
from vfiomgr.model.parsed import TOO_LARGE, parse_json, require_sane, require_shallow

_OPENS_JSON = ("{", "[")
_DIGITS = "for integer string conversion"
"""What int() says of more digits than it converts."""


def parse_document(text: str, source: str, remedy: str) -> Any:  # noqa: ANN401 - as JSON has it
    """What a text says: JSON where it begins as JSON does, else YAML.

    Raises:
        InvalidDocument: it is neither; the message names `source` and the place in it.

    """
    read = _json if text.lstrip().startswith(_OPENS_JSON) else _yaml
    try:
        return read(text)
    except RecursionError:
        why = "it is nested too deeply"
    except ValueError as error:
        why = str(error)
    message = f"{source}: {why}"
    raise InvalidDocument(message, remedy)


def _json(text: str) -> Any:  # noqa: ANN401 - as JSON has it
    try:
        return parse_json(text)
    except ValueError as error:
        message = f"not JSON: {error}"
        raise ValueError(message) from None


def _yaml(text: str) -> Any:  # noqa: ANN401 - as JSON has it
    from ruamel.yaml import YAML  # noqa: PLC0415 - slow, and few documents are YAML
    from ruamel.yaml.error import YAMLError  # noqa: PLC0415

    require_shallow(text)
    try:
        document = YAML(typ="safe", pure=True).load(text)
    except (YAMLError, ValueError, LookupError) as error:  # the last of tags that lie
        message = f"not YAML: {_place(error)}"
        raise ValueError(message) from None
    require_sane(document, len(text))
    return document


def _place(error: Exception) -> str:
    """What is wrong and where, in one line; a scalar that fits no type of YAML has no place."""
    if _DIGITS in str(error):
        return TOO_LARGE
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    return problem if mark is None else f"{problem}: line {mark.line + 1} column {mark.column + 1}"
