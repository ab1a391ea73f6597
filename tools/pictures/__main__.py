"""Draws the pictures of the documents, of made hosts: python -m tools.pictures."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests import api
from tests.fakes.servers import dgx, vgpu_server
from vfiomgr.topology.build import tree_of
from vfiomgr.topology.model import view
from vfiomgr.topology.render import render_html, render_svg

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS = Path(__file__).resolve().parents[2] / "docs"
_HOSTS = {"vgpu": vgpu_server, "dgx": dgx}


def pictures() -> Iterator[tuple[Path, str]]:
    """Each file, and what belongs in it."""
    for name, make in _HOSTS.items():
        with tempfile.TemporaryDirectory() as directory:
            host = api.scan(make(Path(directory)), with_users=True, with_links=True)
        topology = tree_of(host)
        root = view(topology)
        yield DOCS / f"images/topology-{name}.svg", render_svg(topology, root)
        yield DOCS / f"topology-{name}.html", render_html(topology, root)


if __name__ == "__main__":
    for file, text in pictures():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
