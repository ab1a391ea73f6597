"""Documents as text: JSON, YAML, TOML and XML, with line and column of their parts.

`reader` reads documents written by people, JSON or YAML 1.2, into values that know their line and
column; `text` reads JSON and TOML into plain values, or reports them as malformed. `json_text`
changes values in a JSON text and keeps the rest of the text.
"""

from typing import TYPE_CHECKING

from vfiomgr import importing

if TYPE_CHECKING:
    from vfiomgr.documents.reader import misfit_in, read_values

__all__ = ["misfit_in", "read_values"]

if not TYPE_CHECKING:
    __getattr__ = importing(__name__, dict.fromkeys(__all__, "reader"))
