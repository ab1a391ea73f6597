"""The picture as one HTML file that loads nothing: an ARIA tree with a search."""

from __future__ import annotations

import base64
import hashlib
from typing import TYPE_CHECKING

from vfiomgr.topology.render.templates import HUES, asset, colours_of, render
from vfiomgr.topology.view import rows, summary

if TYPE_CHECKING:
    from vfiomgr.topology.model import Topology
    from vfiomgr.topology.view import Item


def render_html(topology: Topology, root: Item, *, unfold: bool = False) -> str:
    """All items; what is folded can be opened there, and is open with `unfold`.

    The content security policy names the style and the script by their digests, so that nothing
    else could run, not even if a name of the host became markup.
    """
    from markupsafe import Markup  # noqa: PLC0415 - as jinja2

    found = list(rows(root, unfold=True))
    levels = range(1, max(row.depth for row in found) + 2)
    style = asset("topology.css") + "".join(
        (
            *(f'[aria-level="{level}"] {{ --level: {level}; }}\n' for level in levels),
            *(f".c{place} {{ --hue: {hue}; }}\n" for place, hue in enumerate(HUES)),
        )
    )
    script = asset("topology.js")
    policy = (
        f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return render(
        "topology.html.j2",
        policy=policy,
        style=Markup(style),  # noqa: S704 - ours
        script=Markup(script),  # noqa: S704 - ours
        summary=summary(topology, root),
        rows=found,
        colours=colours_of(found),
        unfold=unfold,
    )


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
