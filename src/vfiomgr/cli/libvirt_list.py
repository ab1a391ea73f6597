"""`vfiomgr libvirt list`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from vfiomgr.cli.libvirt_connection import complete_domain, connect_option, connected
from vfiomgr.cli.output import note, or_dash, print_document, print_table
from vfiomgr.cli.session import Session, session_options

if TYPE_CHECKING:
    from vfiomgr.planner.claims import Claim

_HEADINGS = ("DEVICE", "DOMAIN", "STATE", "MANAGED", "DRIVER", "NAME")


@click.command("list")
@click.option("--domain", metavar="NAME", shell_complete=complete_domain, help="Of this one alone.")
@connect_option
@session_options()
@click.pass_obj
def list_claims(session: Session, *, domain: str | None, uri: str) -> None:
    """Which domain has which device of this host: PCI functions and vGPUs.

    STATE: running, where a guest has it now; defined, where the definition of a domain claims it
    for its next start; both, where that is the same. A device that several domains claim has a line
    for each; one that is not on this host is shown as missing.

    \b
    Examples:
      vfiomgr libvirt list
      vfiomgr libvirt list --domain win --connect qemu+ssh://node7/system
      vfiomgr libvirt list --format json
    """
    from vfiomgr.planner.claims import claims_of, unread_domains  # noqa: PLC0415 - not for help

    with connected(uri, read_only=True) as connection:
        if domain is not None:
            connection.state(domain)
        hypervisor = connection.hypervisor()
    for text in unread_domains(hypervisor):
        note(text)
    found = claims_of(session.devices(), hypervisor, domain)
    if session.format != "table":
        print_document("DomainDeviceList", {"items": list(map(_item, found))}, session.format)
    elif found:
        print_table(_HEADINGS, [_row(claim) for claim in found])
    else:
        note(f"no domain has a device of the host ({uri})")


def _item(claim: Claim) -> dict[str, Any]:
    return {
        "device": claim.device,
        "kind": claim.kind,
        "name": claim.title,
        "driver": claim.driver,
        "is_on_host": claim.is_on_host,
        "domain": claim.domain,
        "domain_uuid": claim.domain_uuid,
        "running": claim.is_running,
        "defined": claim.is_defined,
        "managed": claim.is_managed,
        "guest_address": claim.guest_address,
    }


def _row(claim: Claim) -> tuple[str, ...]:
    name = claim.title if claim.is_on_host else "missing on this host"
    managed = "-" if claim.kind == "mdev" else "yes" if claim.is_managed else "no"
    return (claim.device, claim.domain, claim.state, managed, or_dash(claim.driver), or_dash(name))
