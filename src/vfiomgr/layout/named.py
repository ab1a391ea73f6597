"""The request to apply a layout from a file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Override
from vfiomgr.documents.named_file import source_of, text_of
from vfiomgr.host.accounts import find_owner
from vfiomgr.layout import requests
from vfiomgr.layout.document import choose_layout, read_layouts
from vfiomgr.paths import MACHINE_ID
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.layout.model import Layout
    from vfiomgr.snapshot.source import HostSource


class ApplyLayout(Value):
    """Apply a layout of `file`; devices already in the desired state are left alone."""

    file: str | os.PathLike[str]
    """A layout file in YAML or JSON."""
    layout: str | None = None
    """The name of the layout, if the file has several."""
    allow: frozenset[Override] = frozenset()
    """Safety checks to override; the error message names them."""

    def request(self, host: HostSource) -> requests.ApplyLayout:
        """The request for a host.

        Raises:
            UsageError: the file cannot be read, or an account does not exist on the host.
            InvalidDocument: the layout does not exist or is malformed.

        """
        path = os.fspath(self.file)
        text = text_of(path, "a layout file")
        return layout_of_text(host, text, source_of(path), self.layout, self.allow)


def layout_of_text(
    host: HostSource, text: str, source: str, name: str | None, allow: frozenset[Override]
) -> requests.ApplyLayout:
    """The request for a layout in a text, with the facts of this host that it needs."""
    chosen, layout = choose_layout(read_layouts(text, source), name)
    tree = None if host.snapshot is not None else host.tree
    return layout_request(tree, chosen, layout, allow=allow)


def layout_request(
    tree: HostTree | None,
    name: str,
    layout: Layout,
    *,
    allow: frozenset[Override] = frozenset(),
) -> requests.ApplyLayout:
    """The request for a layout, with the facts of the host that it needs: accounts, machine ID.

    Raises:
        UsageError: an account does not exist on the host; without a tree, it is not a number.

    """
    from hashlib import sha256  # noqa: PLC0415 - slow to import

    owners = tuple(find_owner(tree, owner) for owner in layout.owners)
    machine = None if tree is None else tree.read(MACHINE_ID)
    # The identifier itself is confidential (machine-id(5)).
    seed = sha256(f"vfiomgr {machine}".encode()).hexdigest() if machine else ""
    return requests.ApplyLayout(name, layout, owners, seed, allow)
