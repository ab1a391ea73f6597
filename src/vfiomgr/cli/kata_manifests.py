"""Objects of Kubernetes on stdout: YAML with comments for people, JSON for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vfiomgr.adapters.kubernetes import render
from vfiomgr.cli.output import print_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vfiomgr.cli.session import Format


def print_objects(objects: Sequence[Any], output: Format) -> None:
    """What `kubectl apply -f -` reads; several in JSON are one List."""
    if output == "json":
        import json  # noqa: PLC0415 - slow

        print_text(json.dumps(render.as_json(objects), indent=2) + "\n")
    else:
        print_text(render.as_yaml(objects))
