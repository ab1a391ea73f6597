"""`vfiomgr libvirt attach` and `detach`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from vfiomgr.cli.libvirt_connection import complete_domain, connect_option, connected
from vfiomgr.cli.output import note, print_document, say
from vfiomgr.cli.session import Session, complete_address, session_options
from vfiomgr.errors import GuestKeepsDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vfiomgr.adapters.libvirt.connection import Connection
    from vfiomgr.adapters.libvirt.exchange import Exchange
    from vfiomgr.model.domain import KnownDomain
    from vfiomgr.planner.attachment import Attachment, AttachPlan
    from vfiomgr.planner.detachment import DetachPlan

_DEADLINE = 60.0
_DOMAIN = click.argument("domain", shell_complete=complete_domain)
_DEVICES = click.argument(
    "devices", nargs=-1, required=True, metavar="ADDRESS|UUID...", shell_complete=complete_address
)
_LIVE = click.option("--live", is_flag=True, help="Change the running guest.")
_CONFIG = click.option("--config", is_flag=True, help="Change the definition, for the next start.")


@click.command("attach")
@_DOMAIN
@_DEVICES
@_LIVE
@_CONFIG
@click.option("--managed", is_flag=True, help="Let libvirt bind and unbind, instead of vfiomgr.")
@click.option("--only", is_flag=True, help="Leave the other functions of the slot out.")
@click.option(
    "--allow",
    multiple=True,
    type=click.Choice(["claimed"]),
    help="Also what the definition of another domain has.",
)
@connect_option
@session_options()
@click.pass_obj
def attach(
    session: Session,
    *,
    domain: str,
    devices: tuple[str, ...],
    live: bool,
    config: bool,
    managed: bool,
    only: bool,
    allow: tuple[str, ...],
    uri: str,
) -> None:
    """Give devices of this host to a domain: functions, virtual functions, vGPUs.

    Without --live and --config both are meant: the definition, and the guest where it runs. What
    libvirt or QEMU would only tell later is looked at before: whether a guest can open the device
    and all of its IOMMU group, who else has or claims it, whether the running guest has a free root
    port. A running guest takes no device of several functions; a definition does. All devices are
    attached, or none.

    \b
    Examples:
      vfiomgr libvirt attach win 0000:41:00.4            # a virtual function
      vfiomgr libvirt attach win 0000:04:00.0 --config   # a GPU with its audio, at the next start
      vfiomgr libvirt attach win f715f63c-0d00-4007-9c5a-b07b0c6c05de --live
      vfiomgr libvirt attach win 0000:04:00.0 --only --live    # one of its functions, now
      vfiomgr libvirt attach win 0000:09:00.0 --managed  # libvirt binds it, if no guard speaks
      vfiomgr libvirt attach win 41:00.4 --config --allow claimed
      vfiomgr libvirt attach win 41:00.4 --connect qemu:///session
      vfiomgr libvirt attach win 41:00.4 --dry-run       # the XML and the calls
    """
    from vfiomgr.planner.attachment import (  # noqa: PLC0415 - not for help
        AttachWish,
        plan_attach,
        usual_scope,
    )

    _require_live(session)
    with connected(uri, read_only=session.dry_run, with_events=not session.dry_run) as connection:
        known = connection.domain(domain)
        scope = usual_scope(known, live=live, config=config)
        wish = AttachWish(devices, scope, managed, only, allow_claimed="claimed" in allow)
        host = session.host(with_users=scope.live)
        plan = plan_attach(host, connection.hypervisor(), known, wish)
        exchanges = [e for item in plan.items for e in _to_attach(item)]
        _carry_out(session, connection, known, plan, exchanges, "attach")


@click.command("detach")
@_DOMAIN
@_DEVICES
@_LIVE
@_CONFIG
@click.option("--only", is_flag=True, help="Leave the other functions of the slot with it.")
@connect_option
@session_options()
@click.pass_obj
def detach(
    session: Session,
    *,
    domain: str,
    devices: tuple[str, ...],
    live: bool,
    config: bool,
    only: bool,
    uri: str,
) -> None:
    """Take devices from a domain, and wait until a running guest has released them.

    Without --live and --config both are meant: the definition, and the guest where it runs. A guest
    releases a device when its system answers; where none does until --deadline (60 seconds), the
    command ends with status 5 and says what it left: the request stands. Devices stay ready for
    guests; vfiomgr unbind gives them back to the host.

    \b
    Examples:
      vfiomgr libvirt detach win 0000:41:00.4
      vfiomgr libvirt detach win 0000:04:00.0 --config
      vfiomgr libvirt detach win 0000:04:00.1 --config --only
      vfiomgr libvirt detach win 0000:41:00.4 --connect qemu:///session
      vfiomgr libvirt detach win 0000:41:00.4 --live --deadline 300
    """
    from vfiomgr.adapters.libvirt.exchange import Exchange  # noqa: PLC0415 - not for help
    from vfiomgr.adapters.libvirt.render import hostdev_source  # noqa: PLC0415
    from vfiomgr.planner.attachment import usual_scope  # noqa: PLC0415
    from vfiomgr.planner.detachment import plan_detach  # noqa: PLC0415

    _require_live(session)
    with connected(uri, read_only=session.dry_run, with_events=not session.dry_run) as connection:
        known = connection.domain(domain)
        scope = usual_scope(known, live=live, config=config)
        plan = plan_detach(known, devices, scope, only=only)
        exchanges = [
            Exchange(item.hostdev.name, hostdev_source(item.hostdev), item.scope)
            for item in plan.items
        ]
        _carry_out(session, connection, known, plan, exchanges, "detach")


def _require_live(session: Session) -> None:
    """A domain is of a running host."""
    if not session.dry_run:
        session.require_live("a snapshot has no domains", "leave out --snapshot, or pass --dry-run")


def _to_attach(item: Attachment) -> Iterator[Exchange]:
    from vfiomgr.adapters.libvirt import render  # noqa: PLC0415 - not for help
    from vfiomgr.adapters.libvirt.exchange import Exchange  # noqa: PLC0415

    for planned in item.hostdevs():
        yield Exchange(planned.device.name, render.hostdev(planned), item.scope)


def _carry_out(  # noqa: PLR0917 - what to do, to whom, and how to tell of it
    session: Session,
    connection: Connection,
    domain: KnownDomain,
    plan: AttachPlan | DetachPlan,
    exchanges: Sequence[Exchange],
    verb: str,
) -> None:
    if session.dry_run:
        _print_plan(session, domain, plan, exchanges, verb)
        return
    from vfiomgr.adapters.libvirt import exchange  # noqa: PLC0415 - not for help

    act: Callable[..., None] = exchange.attach_all if verb == "attach" else exchange.detach_all
    done: list[Exchange] = []
    try:
        act(connection, domain.name, exchanges, session.deadline or _DEADLINE, done.append)
    except GuestKeepsDevice:
        _print_outcome(session, domain, plan, _with_states(exchanges, done), verb)
        raise
    _print_outcome(session, domain, plan, _with_states(exchanges, done), verb)


def _with_states(
    exchanges: Sequence[Exchange], done: Sequence[Exchange]
) -> list[tuple[Exchange, str]]:
    """What became of each: the first that is not done the guest has kept."""
    left = len(exchanges) - len(done)
    states = ["done"] * len(done) + ["kept"] * min(left, 1) + ["not tried"] * max(left - 1, 0)
    return list(zip(exchanges, states, strict=True))


def _print_outcome(
    session: Session,
    domain: KnownDomain,
    plan: AttachPlan | DetachPlan,
    states: Sequence[tuple[Exchange, str]],
    verb: str,
) -> None:
    if session.format != "table":
        body = _body(domain, plan, [one for one, _ in states])
        for item, (_, state) in zip(body["items"], states, strict=True):
            item["state"] = state
        changed = any(state != "not tried" for _, state in states)
        kind = f"{verb.capitalize()}Outcome"
        print_document(kind, {"changed": changed, **body}, session.format)
        return
    for text in plan.already:
        say(text)
    for one, state in states:
        what = {"done": f"{verb}ed", "kept": f"not {verb}ed"}.get(state, state)
        say(f"{what}: {one.device} ({one.scope} of {domain.name})")
    for text in plan.notes:
        note(text)
    if not states:
        say("nothing to do")


def _body(
    domain: KnownDomain, plan: AttachPlan | DetachPlan, exchanges: Sequence[Exchange]
) -> dict[str, Any]:
    return {
        "domain": domain.name,
        "items": [
            {
                "device": one.device,
                "live": one.scope.live,
                "config": one.scope.config,
                "xml": one.element,
            }
            for one in exchanges
        ],
        "already": plan.already,
        "notes": plan.notes,
    }


def _print_plan(
    session: Session,
    domain: KnownDomain,
    plan: AttachPlan | DetachPlan,
    exchanges: Sequence[Exchange],
    verb: str,
) -> None:
    if session.format != "table":
        kind = f"{verb.capitalize()}Plan"
        print_document(kind, _body(domain, plan, exchanges), session.format)
        return
    direction = "to" if verb == "attach" else "from"
    say(f"plan: {verb} {direction} {domain.name}")
    for text in (*plan.already, *plan.notes):
        say(f"  {text}")
    for number, one in enumerate(exchanges, start=1):
        flags = "".join((" --live" * one.scope.live, " --config" * one.scope.config))
        say(f"{number:3}. {verb} {one.device}: {one.scope}")
        say(f"       virsh {verb}-device {domain.argument} /dev/stdin{flags} <<'END'")
        say(*(f"       {line}" for line in one.element.splitlines()))
        say("       END")
    if not exchanges:
        say("nothing to do")
