"""Objects of Kubernetes on stdout: YAML with comments for people, JSON for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from vfiomgr.cli.completion import complete_address
from vfiomgr.cli.options import READING, WholeNumber, session_options
from vfiomgr.cli.output import print_text
from vfiomgr.cli.session import Session, pass_session
from vfiomgr.kata.manifests import render
from vfiomgr.kata.model import DEFAULT_HANDLER
from vfiomgr.kata.named import NAMINGS, Naming, pods
from vfiomgr.kata.named import runtime_class as runtime_class_for
from vfiomgr.usage import forbid_together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vfiomgr.cli.options import Format


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
@session_options(*READING)
@pass_session
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
    wanted = pods(
        session,
        *addresses,
        deployment=deployment,
        name=name,
        namespace=namespace,
        runtime_class=runtime_class,
        image=image,
        resource=resource,
        naming=naming,
        count=count,
        memory=memory,
        cpus=cpus,
    )
    print_objects([render.workload(one) for one in wanted], session.format)


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
@session_options(*READING)
@pass_session
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
    wanted = runtime_class_for(
        session,
        handler,
        name=name,
        default_memory=default_memory,
        config=config,
        cpus=cpus,
        selectors=None if any_node else selectors,
    )
    print_objects([render.runtime_class(wanted)], session.format)
