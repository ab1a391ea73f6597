"""Documents as text: JSON, or YAML 1.2."""

from __future__ import annotations

from typing import Any

from vfiomgr.errors import InvalidDocument

_OPENS_JSON = ("{", "[")


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
    import json  # noqa: PLC0415 - slow to import, and lists need none

    try:
        return json.loads(text)
    except ValueError as error:
        message = f"not JSON: {error}"
        raise ValueError(message) from None


def _yaml(text: str) -> Any:  # noqa: ANN401 - as JSON has it
    from ruamel.yaml import YAML  # noqa: PLC0415 - slow, and few documents are YAML
    from ruamel.yaml.error import YAMLError  # noqa: PLC0415

    try:
        return YAML(typ="safe", pure=True).load(text)
    except (YAMLError, ValueError) as error:
        message = f"not YAML: {_place(error)}"
        raise ValueError(message) from None


def _place(error: Exception) -> str:
    """What is wrong and where, in one line; a scalar that fits no type of YAML has no place."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    return problem if mark is None else f"{problem}: line {mark.line + 1} column {mark.column + 1}"
