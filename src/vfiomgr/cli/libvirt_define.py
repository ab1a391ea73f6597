"""`vfiomgr libvirt define`."""

from __future__ import annotations

import click

from vfiomgr.cli.layout_files import source_of
from vfiomgr.cli.libvirt_connection import connect_option, connected
from vfiomgr.cli.libvirt_files import read_xml
from vfiomgr.cli.output import print_document, say
from vfiomgr.cli.session import Session, session_options


@click.command("define")
@click.argument("file")
@connect_option
@session_options()
@click.pass_obj
def define(session: Session, *, file: str, uri: str) -> None:
    """Define a domain from a file, and make sure that libvirt keeps all of it. - reads from a pipe.

    libvirt checks it against its schema. What it prints afterwards is compared with the file: where
    an element or an attribute is gone, the definition of before is put back, and each is named. A
    running guest has its new definition once it is started anew. A file without a <uuid> is about
    the domain of its name, where there is one.

    \b
    Examples:
      vfiomgr libvirt define guest.xml
      vfiomgr libvirt define guest.xml --dry-run     # whether there is one already
      virsh dumpxml guest | vfiomgr libvirt define -
      vfiomgr libvirt define guest.xml --connect qemu+ssh://node7/system
    """
    xml, source = read_xml(file), source_of(file)
    from vfiomgr.adapters.libvirt.read import read_domain  # noqa: PLC0415 - not for help

    name = read_domain(xml, source).name
    if session.dry_run:
        _tell(session, name, _forecast(xml, source, name, uri), is_changed=False)
        return
    session.require_live("a snapshot has no libvirt", "leave out --snapshot")
    with connected(uri) as connection:
        is_changed = connection.define(xml, source)
        is_active = connection.state(name).is_active
    later = ", for when it is started anew" if is_active and is_changed else ""
    text = f"defined: {name}{later}" if is_changed else f"{name} is defined so already"
    _tell(session, name, text, is_changed=is_changed)


def _forecast(xml: bytes, source: str, name: str, uri: str) -> str:
    """What a run would do; libvirt alone knows whether a definition that is there would change."""
    from vfiomgr.adapters.libvirt.definitions import DefineForecast  # noqa: PLC0415 - not for help

    with connected(uri, read_only=True) as connection:
        forecast = connection.would_define(xml, source)
    return {
        DefineForecast.NEW: f"would define {name} from {source} at {uri}",
        DefineForecast.SAME: f"{name} is defined so already",
        DefineForecast.ANOTHER: f"would define {name} anew from {source}: {uri} has it already",
    }[forecast]


def _tell(session: Session, name: str, text: str, *, is_changed: bool) -> None:
    if session.format == "table":
        say(text)
    else:
        body = {"domain": name, "changed": is_changed, "message": text}
        print_document("DefineOutcome", body, session.format)
