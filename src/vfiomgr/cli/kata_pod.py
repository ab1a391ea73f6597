"""`vfiomgr kata pod`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from vfiomgr.adapters.kubernetes import render
from vfiomgr.cli.kata_manifests import print_objects
from vfiomgr.cli.output import note
from vfiomgr.cli.parameters import WholeNumber, mebibytes
from vfiomgr.cli.readying import tell_how_to_bind
from vfiomgr.cli.session import Session, complete_address, session_options
from vfiomgr.model.cdi import DEFAULT_KIND
from vfiomgr.model.kata import DEFAULT_HANDLER
from vfiomgr.model.kubernetes import (
    require_image,
    require_label,
    require_resource,
    require_subdomain,
)
from vfiomgr.planner.cdi.offer import offers as ready_groups
from vfiomgr.planner.guards import bridge, refuse_if_any
from vfiomgr.planner.kata.mediated import refuse_mediated
from vfiomgr.planner.kata.pods import (
    NAMINGS,
    Naming,
    PodOptions,
    Unit,
    offers,
    pods_for,
    resource_of_none,
    units_of,
)

if TYPE_CHECKING:
    from vfiomgr.model.kubernetes import PodWish
    from vfiomgr.model.snapshot import HostSnapshot


@click.command("pod")
@click.argument("addresses", nargs=-1, shell_complete=complete_address)
@click.option("--deployment", is_flag=True, help="A Deployment that keeps one such pod running.")
@click.option("--name", default="gpu", show_default=True, metavar="NAME", help="Of the pod.")
@click.option("--namespace", metavar="NAME", help="Where it is to be.")
@click.option(
    "--runtime-class",
    default=DEFAULT_HANDLER,
    show_default=True,
    metavar="NAME",
    help="As vfiomgr kata runtimeclass calls it.",
)
@click.option("--image", metavar="IMAGE", help="What runs.  [default: a sample that needs a GPU]")
@click.option(
    "--resource",
    metavar="DOMAIN/NAME",
    help="What the device plugin of your nodes calls the devices; overrides --naming.",
)
@click.option(
    "--naming",
    type=click.Choice(NAMINGS),
    default="kind",
    show_default=True,
    help="Call the resource as cdi generate's kind, as kubevirt-gpu-device-plugin (model) or as "
    "sandbox-device-plugin (pgpu) does.",
)
@click.option(
    "--count",
    type=WholeNumber(min=1, max=16),
    metavar="N",
    help="How many devices.  [default: as many as ADDRESSES, else 1]",
)
@click.option(
    "--memory",
    default="16G",
    show_default=True,
    metavar="SIZE",
    help="Of the container; the VM has default_memory besides.",
)
@click.option(
    "--cpus",
    type=WholeNumber(min=1),
    default=4,
    show_default=True,
    metavar="COUNT",
    help="Of the container.",
)
@session_options()
@click.pass_obj
def pod(
    session: Session,
    addresses: tuple[str, ...],
    *,
    deployment: bool,
    name: str,
    namespace: str | None,
    runtime_class: str,
    image: str | None,
    resource: str | None,
    naming: Naming,
    count: int | None,
    memory: str,
    cpus: int,
) -> None:
    """Print a Pod, or a Deployment, whose VM receives devices of this host.

    One that asks for as many devices as ADDRESSES name; without ADDRESSES one for each resource
    that the devices make which a guest can take. The kubelet chooses which devices of a resource a
    pod receives. A device is an IOMMU group, which goes to one guest whole.

    \b
    Examples:
      vfiomgr kata pod
      vfiomgr kata pod 0000:04:00.0 --memory 32G | kubectl apply -f -
      vfiomgr kata pod --deployment --resource nvidia.com/pgpu --count 2
      vfiomgr kata pod --naming model --image registry.example/train:1 --namespace research
    """
    host = session.host()
    if resource is not None:
        require_resource("--resource", resource)
    units = _units(host, addresses)
    offered = {resource: units} if resource else offers(units, naming, DEFAULT_KIND)
    options = PodOptions(
        kind="Deployment" if deployment else "Pod",
        name=require_label("--name", name),
        namespace=None if namespace is None else require_label("--namespace", namespace),
        runtime_class=require_subdomain("--runtime-class", runtime_class),
        image=None if image is None else require_image("--image", image),
        memory_mib=mebibytes("--memory", memory),
        cpus=cpus,
        count=count,
    )
    together = bool(addresses)
    offered = offered or {resource_of_none(naming, DEFAULT_KIND): ()}
    wishes = pods_for(offered, options, together=together)
    print_objects([render.workload(wish) for wish in wishes], session.format)
    _tell(host, offered, wishes)


def _units(host: HostSnapshot, addresses: tuple[str, ...]) -> tuple[Unit, ...]:
    """The IOMMU groups of what was named, or all that a guest can take now.

    Raises:
        Refusal: a bridge or a mediated device was named.

    """
    if not addresses:
        return tuple(Unit(offer.functions) for offer in ready_groups(host))
    for text in addresses:
        refuse_mediated(host, text)
    named = [host.device(host.parse_address(text)) for text in addresses]
    refuse_if_any([o for device in named for o in bridge(host, device)], frozenset())
    return units_of(host, named)


def _tell(
    host: HostSnapshot, offered: dict[str, tuple[Unit, ...]], wishes: tuple[PodWish, ...]
) -> None:
    """What is still missing for the pods to start."""
    units = [unit for found in offered.values() for unit in found]
    if not units:
        note("nothing is ready for a guest yet: vfiomgr bind ADDRESS; or vfiomgr vgpu create")
    lead = [unit.lead for unit in units]
    tell_how_to_bind(host, [d for d in lead if not host.is_ready_for_guests(d)])
    asked = {item.name: item.count for wish in wishes for item in wish.resources}
    for name, count in asked.items():
        if count > len(offered[name]) > 0:
            note(
                f"a pod asks for {count} of {name}, and on this host there is "
                f"{len(offered[name])}: it waits for a node with more"
            )
        note(
            f"the pods wait until a device plugin offers {name}; a CDI specification of that kind "
            f"comes from: vfiomgr cdi generate --kind {name}"
        )
