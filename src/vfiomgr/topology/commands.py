"""`vfiomgr topology`."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Literal, get_args

import click

from vfiomgr.cli.options import file_option, flag, session_options
from vfiomgr.cli.output import document_text, note, print_text
from vfiomgr.errors import UsageError
from vfiomgr.host.rewrite import rewrite
from vfiomgr.snapshot.completion import complete_address
from vfiomgr.snapshot.filters import note_no_devices
from vfiomgr.snapshot.session import Session, pass_session
from vfiomgr.topology.build import tree_of
from vfiomgr.topology.model import Topology, view
from vfiomgr.topology.render import ASCII, BOXES, render_html, render_svg, render_text

Form = Literal["tree", "svg", "html", "json", "yaml"]
_BY_SUFFIX: dict[str, Form] = {
    ".svg": "svg",
    ".html": "html",
    ".htm": "html",
    ".json": "json",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".txt": "tree",
    "": "tree",
}


@click.command("topology")
@click.argument("addresses", metavar="[ADDRESS]...", nargs=-1, shell_complete=complete_address)
@flag("--all", "unfold", text="Show all virtual functions, ports and chipset functions.")
@click.option(
    "--format",
    "form",
    type=click.Choice(get_args(Form)),
    help="Output format.  [default: by the name of FILE, or tree]",
)
@file_option("--output", text="Write to FILE instead of standard output.")
@session_options("root", "snapshot")
@pass_session
def topology(
    session: Session,
    *,
    addresses: tuple[str, ...],
    unfold: bool,
    form: Form | None,
    output: str | None,
) -> None:
    """Draw the PCI topology of the host.

    It goes from NUMA nodes over root complexes, ports and switches to functions and vGPUs, with
    drivers, IOMMU groups, links and users. Problems are marked. With ADDRESS only the branches
    of these functions are drawn.

    \b
    Examples:
      vfiomgr topology
      vfiomgr topology 0000:04:00.0
      vfiomgr topology --output host.html   # one file for a browser, with a search
    """
    form = form or _usual_form(session, output)
    host = session.scan(with_users=True, with_links=True, purpose="picture")
    found = tree_of(host, session.addresses(addresses))
    if not host.devices:
        note_no_devices(host)
    if not found.knows_links:
        note("link speeds are unknown: the snapshot was made by an earlier version of vfiomgr")
    if not found.knows_users and session.snapshot is None and session.tree.is_live:
        note("processes that use devices are not shown: requires root")
    if output is not None:
        rewrite(output, None, _rendered(found, form, unfold=unfold).encode())
        note(f"wrote {output}")
    elif form == "tree":
        print_text(_for_terminal(found, unfold=unfold))
    else:
        print_text(_rendered(found, form, unfold=unfold))


def _usual_form(session: Session, output: str | None) -> Form:
    """By the name of the file; else what was asked for all commands.

    Raises:
        UsageError: neither names a format.
    """
    suffix = os.path.splitext(output or "")[1].lower()
    known = _BY_SUFFIX.get(suffix)
    if session.format != "table" and known in (None, "tree"):
        return session.format
    if known is None:
        message = f"no format for {suffix!r}"
        remedy = "use .svg, .html, .json, .yaml or .txt, or pass --format"
        raise UsageError(message, remedy)
    return known


def _rendered(found: Topology, form: Form, *, unfold: bool) -> str:
    if form in ("json", "yaml"):
        return document_text(
            "Topology", {n: getattr(found, n) for n in found.__struct_fields__}, form
        )
    root = view(found)
    match form:
        case "svg":
            return render_svg(found, root, unfold=unfold)
        case "html":
            return render_html(found, root, unfold=unfold)
    return render_text(root, unfold=unfold)


def _for_terminal(found: Topology, *, unfold: bool) -> str:
    """As wide as the terminal, in characters of its locale; a pipe gets long lines."""
    is_terminal = sys.stdout.isatty()
    encoding = sys.stdout.encoding or "utf-8"
    text = render_text(
        view(found),
        unfold=unfold,
        glyphs=BOXES if _can_encode("".join(BOXES), encoding) else ASCII,
        width=shutil.get_terminal_size().columns if is_terminal else None,
        has_colours=is_terminal and not os.environ.get("NO_COLOR"),
    )
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _can_encode(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True
