"""`vfiomgr libvirt edit FILE --define`: define a domain from a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.cli.output import print_document, say
from vfiomgr.documents.text import source_of
from vfiomgr.libvirt.client.define import DefineForecast
from vfiomgr.libvirt.commands.connection import connected, require_running_host
from vfiomgr.libvirt.xml.read import read_domain, read_xml

if TYPE_CHECKING:
    from vfiomgr.cli.session import Session


def define_domain(session: Session, file: str, uri: str) -> None:
    """Define the domain of a file, and compare the definition that libvirt has then."""
    xml, source = read_xml(file), source_of(file)
    name = read_domain(xml, source).name
    if session.dry_run:
        _tell(session, name, _forecast(xml, source, name, uri), is_changed=False)
        return
    require_running_host(session)
    with connected(uri) as connection:
        is_changed = connection.define(xml, source)
        is_active = connection.state(name).is_active
    later = ", for its next start" if is_active and is_changed else ""
    text = f"defined: {name}{later}" if is_changed else f"{name} already has this definition"
    _tell(session, name, text, is_changed=is_changed)


def _forecast(xml: bytes, source: str, name: str, uri: str) -> str:
    """What a run would do; only libvirt can tell whether an existing definition would change."""
    with connected(uri, read_only=True) as connection:
        forecast = connection.would_define(xml, source)
    return {
        DefineForecast.NEW: f"would define {name} from {source} at {uri}",
        DefineForecast.SAME: f"{name} already has this definition",
        DefineForecast.ANOTHER: f"would redefine {name} from {source}: it exists at {uri}",
    }[forecast]


def _tell(session: Session, name: str, text: str, *, is_changed: bool) -> None:
    if session.format == "table":
        say(text)
    else:
        body = {"domain": name, "changed": is_changed, "message": text}
        print_document("DefineOutcome", body, session.format)
