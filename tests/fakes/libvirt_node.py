"""A node of libvirt's test driver for one test: `test:///default` is one for a whole process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_NODE = """\
<node>
  <domain type='test'>
    <name>test</name>
    <memory>8388608</memory>
    <os><type>hvm</type></os>
  </domain>
</node>
"""


def node_uri(directory: Path) -> str:
    """The URI of a node of its own, with one running domain, `test`."""
    file = directory / "libvirt-node.xml"
    file.write_text(_NODE)
    return f"test://{file}"
