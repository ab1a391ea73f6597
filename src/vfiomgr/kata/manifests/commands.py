"""Objects of Kubernetes on stdout: YAML with comments for people, JSON for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from vfiomgr.cli.options import WholeNumber
from vfiomgr.cli.output import note, print_text
from vfiomgr.cli.session import Session, complete_address, session_options
from vfiomgr.containers.cdi.generate import offers as ready_groups
from vfiomgr.containers.cdi.model import DEFAULT_KIND
from vfiomgr.containers.cdi.names import is_kind
from vfiomgr.errors import InvalidDocument
from vfiomgr.kata.config.plan import GPU_MEMORY_MIB
from vfiomgr.kata.config.sizing import recommended_overhead_mib
from vfiomgr.kata.explain import facts as gather
from vfiomgr.kata.explain.image import devices_named
from vfiomgr.kata.manifests import render
from vfiomgr.kata.manifests.model import (
    RuntimeClassRequest,
    parse_selector,
    require_image,
    require_label,
    require_resource,
    require_subdomain,
)
from vfiomgr.kata.manifests.plan import (
    NAMINGS,
    Naming,
    PodDevice,
    PodOptions,
    offers,
    pods_for,
    resource_of_none,
    units_of,
)
from vfiomgr.kata.model import DEFAULT_HANDLER, guest_mebibytes
from vfiomgr.passthrough.readiness_hints import tell_how_to_bind
from vfiomgr.units import mebibytes
from vfiomgr.usage import forbid_together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vfiomgr.cli.session import Format
    from vfiomgr.kata.manifests.model import PodRequest
    from vfiomgr.snapshot.model import HostSnapshot


def print_objects(objects: Sequence[Any], output: Format) -> None:
    """What `kubectl apply -f -` reads; several in JSON are one List."""
    if output == "json":
        import json  # noqa: PLC0415 - slow

        print_text(json.dumps(render.as_json(objects), indent=2) + "\n")
    else:
        print_text(render.as_yaml(objects))


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
    host = session.scan()
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
    _tell(session, host, offered, wishes)


def _units(host: HostSnapshot, addresses: tuple[str, ...]) -> tuple[PodDevice, ...]:
    """The IOMMU groups of what was named, or all that a guest can take now.

    Raises:
        Refusal: a bridge or a mediated device was named.

    """
    if not addresses:
        return tuple(PodDevice(offer.functions) for offer in ready_groups(host))
    return units_of(host, devices_named(host, addresses))


def _tell(
    session: Session,
    host: HostSnapshot,
    offered: dict[str, tuple[PodDevice, ...]],
    wishes: tuple[PodRequest, ...],
) -> None:
    """What is still missing for the pods to start."""
    units = [unit for found in offered.values() for unit in found]
    if not units:
        note("nothing is ready for a guest yet: vfiomgr bind ADDRESS; or vfiomgr vgpu create")
    lead = [unit.lead for unit in units]
    tell_how_to_bind(session, host, [d for d in lead if not host.is_ready_for_guests(d)])
    asked = {item.name: item.count for wish in wishes for item in wish.resources}
    for name, count in asked.items():
        if not is_kind(name):
            note(
                f"{name} can be no kind of CDI: vendor and class have two characters or more, the "
                "first a letter. Kata looks for what the kubelet tells of in the kind that is the "
                "resource: pods fail with cold-plugged devices. Have the device plugin call it "
                "otherwise, and write that: --resource domain/name"
            )
            continue
        if count > len(offered[name]) > 0:
            note(
                f"a pod asks for {count} of {name}, and on this host there is "
                f"{len(offered[name])}: it waits for a node with more"
            )
        note(
            f"the pods wait until a device plugin offers {name}; a CDI specification of that kind "
            f"comes from: vfiomgr cdi generate --kind {name}"
        )


DEFAULT_SELECTOR = (("katacontainers.io/kata-runtime", "true"),)
"""The label that kata-deploy gives to nodes where it has installed Kata."""


@click.command("runtimeclass")
@click.option(
    "--handler",
    default=DEFAULT_HANDLER,
    show_default=True,
    metavar="NAME",
    help="What containerd or CRI-O calls it.",
)
@click.option("--name", metavar="NAME", help="What pods call it.  [default: as the handler]")
@click.option(
    "--default-memory",
    metavar="SIZE",
    help="default_memory of Kata's configuration.  [default: read from it, else 8192M]",
)
@click.option(
    "--config", metavar="FILE", help="Kata's configuration.  [default: the one of the handler]"
)
@click.option(
    "--cpus",
    type=WholeNumber(min=1),
    default=1,
    show_default=True,
    metavar="COUNT",
    help="Processors of the overhead: default_vcpus of Kata's configuration.",
)
@click.option(
    "--node-selector",
    "selectors",
    multiple=True,
    metavar="KEY=VALUE",
    help="A label of nodes with the handler.  [default: katacontainers.io/kata-runtime=true]",
)
@click.option("--any-node", is_flag=True, help="No node selector: all nodes have the handler.")
@session_options()
@click.pass_obj
def runtimeclass(
    session: Session,
    *,
    handler: str,
    name: str | None,
    default_memory: str | None,
    config: str | None,
    cpus: int,
    selectors: tuple[str, ...],
    any_node: bool,
) -> None:
    """Print a RuntimeClass for a handler, with an overhead that its VMs fit in.

    Kubernetes adds the overhead to the limits of a pod's containers, in the scheduler and in the
    pod's cgroup. A VM has default_memory besides those limits, and VFIO pins all of it: with a
    smaller overhead QEMU is killed once the guest runs.

    \b
    Examples:
      vfiomgr kata runtimeclass | kubectl apply -f -
      vfiomgr kata runtimeclass --handler kata-gpu --default-memory 4G
      vfiomgr kata runtimeclass --name kata-gpu --node-selector gpu=vfio
      vfiomgr kata runtimeclass --config /etc/kata-containers/configuration.toml
    """
    if any_node and selectors:
        forbid_together("--any-node", "--node-selector", "one says which nodes, the other all")
    chosen = tuple(parse_selector("--node-selector", text) for text in selectors)
    require_label("--handler", handler)
    memory = _default_memory(session, handler, default_memory, config)
    wish = RuntimeClassRequest(
        name=require_subdomain("--name", name or handler),
        handler=handler,
        overhead_mib=recommended_overhead_mib(memory),
        overhead_cpus=cpus,
        default_memory_mib=memory,
        node_selector=() if any_node else (chosen or DEFAULT_SELECTOR),
    )
    print_objects([render.runtime_class(wish)], session.format)


def _default_memory(session: Session, handler: str, typed: str | None, config: str | None) -> int:
    """What was typed, else what the configuration says, else what those for GPUs say.

    Raises:
        InvalidDocument: the configuration is there, and is no TOML.

    """
    if typed is not None:
        if config is not None:
            forbid_together("--default-memory", "--config", "both say how much memory a guest has")
        return guest_mebibytes("--default-memory", typed)
    if config is not None:
        facts = gather.named_configuration(session, config)
    else:
        facts = gather.configuration_of(session, handler)
    settings = facts.settings
    if settings is None and facts.file is not None:
        raise InvalidDocument(facts.problem, "correct that place, or tell --default-memory SIZE")
    if settings is not None and settings.default_memory_mib is not None:
        note(f"default_memory is {settings.default_memory_mib} MiB in {settings.path}")
        return settings.default_memory_mib
    why = facts.problem or "it is not set there"
    note(
        f"default_memory is taken to be {GPU_MEMORY_MIB} MiB, as in Kata's configurations for "
        f"GPUs ({why}); --default-memory says otherwise"
    )
    return GPU_MEMORY_MIB
