"""`vfiomgr libvirt attach`, `detach` and `list`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

import click

from vfiomgr.cli.options import CHANGING, declared, flag, function_only_option, session_options
from vfiomgr.cli.output import note, or_dash, print_document, print_table, say
from vfiomgr.cli.table import cut
from vfiomgr.libvirt.attach.claims import DeviceOwner, claims_of, unread_domains
from vfiomgr.libvirt.attach.named import DomainChange, ScopeOptions, State, attaching, detaching
from vfiomgr.libvirt.commands.connection import (
    complete_domain,
    connect_option,
    connected,
    require_libvirt_of_host,
    require_running_host,
)
from vfiomgr.snapshot.session import Session, pass_session
from vfiomgr.vgpu.completion import complete_device

if TYPE_CHECKING:
    from vfiomgr.libvirt.client.connection import Connection


_DOMAIN = click.argument("domain", shell_complete=complete_domain)
_DEVICES = click.argument(
    "devices", nargs=-1, required=True, metavar="ADDRESS|UUID...", shell_complete=complete_device
)


@click.command("attach")
@_DOMAIN
@_DEVICES
@declared(ScopeOptions)
@flag("--managed", text="Let libvirt bind and unbind, instead of vfiomgr.")
@function_only_option("Leave the other functions of the slot out.")
@click.option(
    "--allow",
    multiple=True,
    type=click.Choice(["claimed"]),
    help="Also attach devices claimed by another domain.",
)
@connect_option
@session_options(*CHANGING)
@pass_session
def attach(
    session: Session,
    *,
    domain: str,
    devices: tuple[str, ...],
    managed: bool,
    allow: tuple[str, ...],
    uri: str,
    **options: Unpack[ScopeOptions],
) -> None:
    """Attach devices of this host to a domain.

    Devices are PCI functions, virtual functions and vGPUs. Without --live and --config the
    definition is changed, and the guest if it runs. All checks are made first: whether a guest can
    open the device and its entire IOMMU group, which other domains have or claim it, and whether
    the running guest has a free root port. A multifunction device can be added to a definition, but
    not to a running guest. All devices are attached, or none.

    \b
    Examples:
      vfiomgr libvirt attach win 0000:41:00.4            # a virtual function
      vfiomgr libvirt attach win 0000:04:00.0 --config   # a GPU with its audio, at the next start
      vfiomgr libvirt attach win f715f63c-0d00-4007-9c5a-b07b0c6c05de --live
      vfiomgr libvirt attach win 0000:04:00.0 --function-only --live    # one of its functions, now
      vfiomgr libvirt attach win 0000:09:00.0 --managed  # libvirt binds it
      vfiomgr libvirt attach win 41:00.4 --config --allow claimed
      vfiomgr libvirt attach win 41:00.4 --connect qemu:///session
      vfiomgr libvirt attach win 41:00.4 --dry-run       # the XML and the calls
    """
    require_running_host(session)
    with connected(uri, read_only=session.dry_run, with_events=not session.dry_run) as connection:
        change = attaching(
            connection,
            session,
            domain,
            *devices,
            managed=managed,
            allow_claimed="claimed" in allow,
            **options,
        )
        _carry_out(session, connection, change)


@click.command("detach")
@_DOMAIN
@_DEVICES
@declared(ScopeOptions)
@function_only_option("Leave the other functions of the slot attached.")
@connect_option
@session_options(*CHANGING)
@pass_session
def detach(
    session: Session,
    *,
    domain: str,
    devices: tuple[str, ...],
    uri: str,
    **options: Unpack[ScopeOptions],
) -> None:
    """Detach devices from a domain.

    Without --live and --config the definition is changed, and the guest if it runs. A running guest
    releases a device when its system answers. If it does not answer within --timeout (60 seconds),
    the exit status is 5 and the request stays pending. The devices stay available to guests;
    vfiomgr unbind returns them to the host.

    \b
    Examples:
      vfiomgr libvirt detach win 0000:41:00.4
      vfiomgr libvirt detach win 0000:04:00.0 --config
      vfiomgr libvirt detach win 0000:04:00.1 --config --function-only
      vfiomgr libvirt detach win 0000:41:00.4 --connect qemu:///session
      vfiomgr libvirt detach win 0000:41:00.4 --live --timeout 300
    """
    require_running_host(session)
    with connected(uri, read_only=session.dry_run, with_events=not session.dry_run) as connection:
        change = detaching(connection, domain, *devices, **options)
        _carry_out(session, connection, change)


def _carry_out(session: Session, connection: Connection, change: DomainChange) -> None:
    if session.dry_run:
        _print_plan(session, change)
        return
    states, kept = change.apply(connection, session.timeout)
    _print_outcome(session, change, states)
    if kept is not None:
        raise kept


def _print_outcome(session: Session, change: DomainChange, states: Sequence[State]) -> None:
    verb = change.verb
    if session.format != "table":
        body = _body(change)
        for item, state in zip(body["items"], states, strict=True):
            item["state"] = state
        changed = any(state != "not tried" for state in states)
        kind = f"{verb.capitalize()}Outcome"
        print_document(kind, {"changed": changed, **body}, session.format)
        return
    for text in change.already:
        say(text)
    for one, state in zip(change.changes, states, strict=True):
        what = {"done": f"{verb}ed", "kept": f"not {verb}ed"}.get(state, state)
        say(f"{what}: {one.device} ({one.scope} of {change.domain.name})")
    for text in change.notes:
        note(text)
    if not states:
        say("nothing to do")


def _body(change: DomainChange) -> dict[str, Any]:
    return {
        "domain": change.domain.name,
        "items": [
            {
                "device": one.device,
                "live": one.scope.live,
                "config": one.scope.config,
                "xml": one.element,
            }
            for one in change.changes
        ],
        "already": change.already,
        "notes": change.notes,
    }


def _print_plan(session: Session, change: DomainChange) -> None:
    verb, domain = change.verb, change.domain
    if session.format != "table":
        print_document(f"{verb.capitalize()}Plan", _body(change), session.format)
        return
    direction = "to" if verb == "attach" else "from"
    say(f"plan: {verb} {direction} {domain.name}")
    for text in (*change.already, *change.notes):
        say(f"  {text}")
    for number, one in enumerate(change.changes, start=1):
        flags = " --live" if one.scope.live else ""
        flags += " --config" if one.scope.config else ""
        say(f"{number:3}. {verb} {one.device}: {one.scope}")
        say(f"       virsh {verb}-device {domain.argument} /dev/stdin{flags} <<'END'")
        say(*(f"       {line}" for line in one.element.splitlines()))
        say("       END")
    if not change.changes:
        say("nothing to do")


_HEADINGS = ("DEVICE", "DOMAIN", "STATE", "MANAGED", "DRIVER", cut("NAME"))


@click.command("list")
@click.option(
    "--domain", metavar="NAME", shell_complete=complete_domain, help="Show only this domain."
)
@connect_option
@session_options("format", "root", "timeout")
@pass_session
def list_claims(session: Session, *, domain: str | None, uri: str) -> None:
    """List host devices (PCI functions, vGPUs) by domain.

    STATE is running if a guest has the device now, defined if the definition of a domain claims it
    for the next start, and both if both apply. A device that several domains claim has one line for
    each. A device that is not on this host is shown as missing.

    \b
    Examples:
      vfiomgr libvirt list
      vfiomgr libvirt list --domain win --connect qemu+ssh://node7/system
      vfiomgr libvirt list --format json
    """
    require_libvirt_of_host(session, "run vfiomgr on that host, or pass its --connect URI")
    with connected(uri, read_only=True) as connection:
        if domain is not None:
            connection.state(domain)
        hypervisor = connection.hypervisor()
    for text in unread_domains(hypervisor):
        note(text)
    found = claims_of(session.scan_devices(), hypervisor, domain)
    if session.format != "table":
        print_document("DomainDeviceList", {"items": list(map(_item, found))}, session.format)
    elif found:
        print_table(_HEADINGS, [_row(claim) for claim in found])
    else:
        note(f"no domain has a host device ({uri})")


def _item(claim: DeviceOwner) -> dict[str, Any]:
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


def _row(claim: DeviceOwner) -> tuple[str, ...]:
    name = claim.title if claim.is_on_host else "missing on this host"
    managed = "-" if claim.kind == "mdev" else "yes" if claim.is_managed else "no"
    return (claim.device, claim.domain, claim.state, managed, or_dash(claim.driver), or_dash(name))
