"""`vfiomgr cdi generate`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from vfiomgr.cli.change import plan_or_apply, print_outcome
from vfiomgr.cli.output import note, print_text, print_yaml
from vfiomgr.cli.session import Session, complete_address, session_options
from vfiomgr.errors import UsageError
from vfiomgr.host.rewrite import rewrite
from vfiomgr.model.cdi import (
    DEFAULT_KIND,
    DIRECTORIES,
    NAMINGS,
    NODE_FORMS,
    OLD_DYNAMIC,
    Lifetime,
    Naming,
    NodeForm,
    OfferWish,
)
from vfiomgr.model.intent import WriteCdi
from vfiomgr.planner.cdi.consumers import ANY, NAMES, consumers_named

if TYPE_CHECKING:
    from vfiomgr.model.cdi import CdiSpecification
    from vfiomgr.model.snapshot import HostSnapshot

_MACHINE = "/"
_LOOKED_IN = (*DIRECTORIES.values(), OLD_DYNAMIC)


@click.command("generate")
@click.argument("addresses", nargs=-1, shell_complete=complete_address)
@click.option(
    "--kind",
    default=DEFAULT_KIND,
    show_default=True,
    metavar="VENDOR/CLASS",
    help="Kata wants the resource name of the kubelet plugin here.",
)
@click.option(
    "--name-by",
    type=click.Choice(NAMINGS),
    default="address",
    show_default=True,
    help="What devices are called; Kata wants the identifiers of the kubelet plugin here.",
)
@click.option(
    "--node",
    type=click.Choice(NODE_FORMS),
    default="auto",
    show_default=True,
    help="Groups (/dev/vfio/N) or cdevs (/dev/vfio/devices/vfioN); auto prefers groups.",
)
@click.option(
    "--consumer",
    type=click.Choice(NAMES),
    default=ANY,
    show_default=True,
    metavar="NAME",
    help="Who must read it; for containerd or podman, mediated devices and /dev/iommu too.",
)
@click.option(
    "--output",
    metavar="FILE",
    help="Write it to FILE of this machine, as > does; --write is for the host below --root.",
)
@click.option("--write", is_flag=True, help="Keep it where runtimes look; a second run adds none.")
@click.option(
    "--lifetime",
    type=click.Choice(tuple(DIRECTORIES)),
    default="static",
    show_default=True,
    help="With --write: in /etc/cdi, or in /run/cdi, which a reboot empties.",
)
@session_options()
@click.pass_obj
def generate(
    session: Session,
    *,
    addresses: tuple[str, ...],
    kind: str,
    name_by: Naming,
    node: NodeForm,
    consumer: str,
    output: str | None,
    write: bool,
    lifetime: Lifetime,
) -> None:
    """Print a CDI specification of ADDRESSES, or of all that a guest can take, as JSON (or YAML).

    That is what is bound, and virtual functions that the vendor's own driver has made vGPUs. A
    device is an IOMMU group with all of its functions, under the address of its first GPU. The
    lowest CDI version that carries it is written. Where nothing is ready it is refused: consumers
    reject a specification without devices.

    With --write it is kept in /etc/cdi/vfiomgr-VENDOR_CLASS.json, put there whole. ADDRESSES come
    to those that are there; without any, the file has what is ready now and nothing else. What goes
    later (unbind, vgpu remove, …) is taken out by itself, and an empty file is removed.

    \b
    Examples:
      vfiomgr cdi generate
      vfiomgr cdi generate --write
      vfiomgr cdi generate --kind nvidia.com/pgpu --name-by index --write
      vfiomgr cdi generate 0000:04:00.0 --node cdev --write --lifetime dynamic
      vfiomgr cdi generate --consumer kata-rs --output pgpu.json
    """
    if write and output is not None:
        message = "--write and --output contradict each other"
        raise UsageError(message, "pass one of them: --write knows where runtimes look")
    if output is not None:
        _refuse_of_this_machine(session, output)
    if lifetime != "static" and not write:
        message = "--lifetime does nothing without --write"
        raise UsageError(message, "pass --write too: it knows where runtimes look")
    wish = OfferWish(
        kind=kind,
        addresses=session.addresses(addresses),
        node=node,
        name_by=name_by,
        is_plain=not any(reader.is_kata for reader in consumers_named(consumer)),
        consumer=consumer,
    )
    if write:
        _write(session, WriteCdi(wish, lifetime))
    else:
        _print(session, wish, output)


def _refuse_of_this_machine(session: Session, output: str) -> None:
    """Make sure that what is about another host does not come to where runtimes of this one look.

    Raises:
        UsageError: it would.

    """
    is_another = session.snapshot is not None or os.path.realpath(session.root) != _MACHINE
    if is_another and os.path.dirname(os.path.abspath(output)) in _LOOKED_IN:
        message = f"--output {output} is where runtimes of this machine look, not of that host"
        raise UsageError(message, "pass --write with --root, or name a file elsewhere")


def _write(session: Session, intent: WriteCdi) -> None:
    outcome = plan_or_apply(session, intent)
    if outcome is not None:
        steps = outcome.plan.steps if outcome.is_changed else ()
        print_outcome(session, outcome, [f"done: {step.describe()}" for step in steps])


def _print(session: Session, wish: OfferWish, output: str | None) -> None:
    from vfiomgr.model.cdi_document import (  # noqa: PLC0415 - not for help
        document_of,
        render_specification,
    )
    from vfiomgr.planner.cdi.offer import nothing_ready, specification_of  # noqa: PLC0415

    host = session.host()
    made = specification_of(host, wish)
    if not made.devices:
        raise nothing_ready(host)
    _tell_of_mediated(host, wish)
    if output is not None:
        _save(output, made, dry_run=session.dry_run)
    elif session.format == "yaml":
        print_yaml(document_of(made))
    else:
        print_text(render_specification(made))


def _save(output: str, made: CdiSpecification, *, dry_run: bool) -> None:
    from vfiomgr.model.cdi_document import render_specification  # noqa: PLC0415 - as above

    if dry_run:
        note(f"would be written to {output}: {len(made.devices)} devices")
        return
    rewrite(output, None, render_specification(made).encode())
    note(f"written to {output}")


def _tell_of_mediated(host: HostSnapshot, wish: OfferWish) -> None:
    if not wish.is_plain and any(vgpu.uuid is not None for vgpu in host.vgpus):
        note(
            "vGPUs that are mediated devices are left out, since Kata cannot attach them: "
            "--consumer containerd or podman has them, for containers that run a guest themselves"
        )
