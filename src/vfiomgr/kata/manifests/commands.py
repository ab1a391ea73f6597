"""Print Kubernetes objects: YAML with comments for people, JSON for programs."""

from __future__ import annotations

from functools import update_wrapper
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import click

from vfiomgr.cli.options import READING, WholeNumber, session_options, typed_options, with_options
from vfiomgr.cli.output import print_text
from vfiomgr.containers.cdi.completion import complete_cdi_kind
from vfiomgr.errors import forbid_alone, forbid_together
from vfiomgr.kata import kubernetes as render
from vfiomgr.kata.completion import complete_handler
from vfiomgr.kata.model import DEFAULT_HANDLER
from vfiomgr.kata.workloads import NAMINGS, Naming, pods
from vfiomgr.kata.workloads import runtime_class as runtime_class_for
from vfiomgr.snapshot.completion import complete_address, complete_host_file
from vfiomgr.snapshot.session import Session, pass_session
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vfiomgr.cli.options import Format
    from vfiomgr.kata.kubernetes import PodRequest


def print_objects(objects: Sequence[Any], output: Format) -> None:
    """Print the input for `kubectl apply -f -`; in JSON several objects are one List."""
    if output == "json":
        import json  # noqa: PLC0415 - slow

        print_text(json.dumps(render.as_json(objects), indent=2) + "\n")
    else:
        print_text(render.as_yaml(objects))


class _PodOptions(TypedDict):
    """The options of pods, which a RuntimeClass lacks, except the last."""

    deployment: bool
    name: str
    namespace: str | None
    image: str | None
    resource: str | None
    naming: Naming
    count: int | None
    memory: str
    cpus: int
    runtime_class: str
    dra: bool
    kubevirt: bool


class _ClassOptions(Value):
    """The options of a RuntimeClass."""

    handler: str | None
    default_memory: str | None
    config: str | None
    overhead_cpus: int | None
    selectors: tuple[str, ...]
    any_node: bool


_CLASS_OPTIONS = (
    click.option(
        "--handler",
        metavar="NAME",
        shell_complete=complete_handler,
        help="RuntimeClass: refer to this handler.  [default: its own name]",
    ),
    click.option(
        "--default-memory",
        metavar="SIZE",
        help="RuntimeClass: Kata's default_memory.  [default: as configured, else 8192M]",
    ),
    click.option(
        "--config",
        metavar="FILE",
        shell_complete=complete_host_file,
        help="RuntimeClass: use this Kata configuration.  [default: that of the handler]",
    ),
    click.option(
        "--overhead-cpus",
        type=WholeNumber(min=1),
        metavar="COUNT",
        help="RuntimeClass: CPUs of the overhead, like Kata's default_vcpus.  [default: 1]",
    ),
    click.option(
        "--node-selector",
        "selectors",
        multiple=True,
        metavar="KEY=VALUE",
        help="RuntimeClass: select nodes.  [default: katacontainers.io/kata-runtime=true]",
    ),
    click.option("--any-node", is_flag=True, help="RuntimeClass: select all nodes."),
)


def _class_options(command: Callable[..., None]) -> Callable[..., Any]:
    """Add the options of a RuntimeClass, which the command gets as one value."""

    def function(*arguments: Any, **options: Any) -> None:  # noqa: ANN401 - click's
        names = _ClassOptions.__struct_fields__
        of_class = _ClassOptions(**{name: options.pop(name) for name in names})
        command(*arguments, of_class=of_class, **options)

    return with_options(update_wrapper(function, command), *_CLASS_OPTIONS)


@click.command("pod")
@click.argument("addresses", nargs=-1, shell_complete=complete_address)
@click.option(
    "--deployment", is_flag=True, help="Print a Deployment that keeps one such pod running."
)
@click.option(
    "--name", default="gpu", show_default=True, metavar="NAME", help="Set the name of the pod."
)
@click.option("--namespace", metavar="NAME", help="Set the namespace.")
@click.option(
    "--runtime-class",
    default=DEFAULT_HANDLER,
    show_default=True,
    metavar="NAME",
    shell_complete=complete_handler,
    help="Use this RuntimeClass.",
)
@click.option(
    "--image", metavar="IMAGE", help="Run this image.  [default: a sample that needs a GPU]"
)
@click.option(
    "--resource",
    metavar="DOMAIN/NAME",
    shell_complete=complete_cdi_kind,
    help="Request this device plugin resource; overrides --naming.",
)
@click.option(
    "--naming",
    type=click.Choice(NAMINGS),
    default="agent",
    show_default=True,
    help="Name the resource like vfiomgr's node agent, kubevirt-gpu-device-plugin (model) or "
    "sandbox-device-plugin (pgpu).",
)
@click.option(
    "--dra",
    is_flag=True,
    help="Request devices by a ResourceClaimTemplate (DRA) instead of a resource.",
)
@click.option("--kubevirt", is_flag=True, help="Print a KubeVirt VirtualMachine instead of a pod.")
@click.option(
    "--count",
    type=WholeNumber(min=1, max=16),
    metavar="N",
    help="Request this many devices.  [default: as many as ADDRESSES, else 1]",
)
@click.option(
    "--memory",
    default="16G",
    show_default=True,
    metavar="SIZE",
    help="Limit container memory; a Kata VM adds default_memory.",
)
@click.option(
    "--cpus",
    type=WholeNumber(min=1),
    default=4,
    show_default=True,
    metavar="COUNT",
    help="Limit the CPUs of the container.",
)
@click.option(
    "--runtimeclass", "is_class", is_flag=True, help="Print the RuntimeClass instead of pods."
)
@_class_options
@session_options(*READING)
@pass_session
def pod(
    session: Session,
    addresses: tuple[str, ...],
    *,
    is_class: bool,
    of_class: _ClassOptions,
    **options: Unpack[_PodOptions],
) -> None:
    """Print a Pod, KubeVirt VM or RuntimeClass for host devices.

    With ADDRESSES one pod requests as many devices as they name; without, one pod is printed for
    each resource of the available devices. The kubelet chooses which devices of a resource a pod
    gets. A device is an entire IOMMU group.

    With --kubevirt a VM of KubeVirt requests them. It boots from a container disk (--image), and
    --memory and --cpus are those of the guest.

    With --dra and --resource, a DeviceClass offers the devices under that name, for pods that have
    limits instead of claims.

    --runtimeclass prints the RuntimeClass that pods refer to, with overhead. Kubernetes adds the
    overhead to the container limits of a pod, in the scheduler and in the pod's cgroup. A VM uses
    default_memory in addition to those limits, and VFIO pins all of it: if the overhead is too
    small, QEMU is killed while the guest runs.

    \b
    Examples:
      vfiomgr kata pod
      vfiomgr kata pod 0000:04:00.0 --memory 32G | kubectl apply -f -
      vfiomgr kata pod --deployment --resource nvidia.com/pgpu --count 2
      vfiomgr kata pod --naming model --image registry.example/train:1 --namespace research
      vfiomgr kata pod 0000:04:00.0 --dra
      vfiomgr kata pod 0000:04:00.0 --dra --kubevirt | kubectl apply -f -
      vfiomgr kata pod 0000:04:00.0 --dra --resource example.com/a40
      vfiomgr kata pod --runtimeclass | kubectl apply -f -
      vfiomgr kata pod --runtimeclass --runtime-class kata-gpu --default-memory 4G
      vfiomgr kata pod --runtimeclass --handler kata-gpu --node-selector gpu=vfio
      vfiomgr kata pod --runtimeclass --config /etc/kata-containers/configuration.toml
    """
    if is_class:
        _forbid_pods(addresses, options)
        _print_class(session, options["runtime_class"], of_class)
        return
    _forbid_mixtures(options, of_class)
    wanted = pods(session, *addresses, **options)
    print_objects([each for one in wanted for each in _objects_for(one)], session.format)


def _forbid_pods(addresses: tuple[str, ...], options: _PodOptions) -> None:
    """Refuse devices and options that a RuntimeClass does not have."""
    if addresses:
        forbid_together("--runtimeclass", "ADDRESS", "a RuntimeClass names no devices")
    for option in typed_options([key for key in options if key != "runtime_class"]):
        forbid_together("--runtimeclass", option, "a RuntimeClass has no such setting")


def _forbid_mixtures(options: _PodOptions, of_class: _ClassOptions) -> None:
    """Refuse options that a pod or a VM of KubeVirt does not have."""
    given = {
        "--handler": of_class.handler,
        "--default-memory": of_class.default_memory,
        "--config": of_class.config,
        "--overhead-cpus": of_class.overhead_cpus,
        "--node-selector": of_class.selectors,
        "--any-node": of_class.any_node,
    }
    for option, value in given.items():
        if value:
            forbid_alone(option, "--runtimeclass", "pods have no such setting")
    if options["dra"]:
        if typed_options(["naming"]):
            forbid_together("--dra", "--naming", "a claim selects devices by their model")
        if options["resource"] and options["kubevirt"]:
            why = "KubeVirt does not find the devices of a DeviceClass by its resource name"
            forbid_together("--kubevirt", "--resource with --dra", why)
    if options["kubevirt"]:
        for option in typed_options(["deployment", "runtime_class"]):
            forbid_together("--kubevirt", option, "KubeVirt starts its VMs itself")


def _objects_for(request: PodRequest) -> Iterator[render.Object]:
    """A pod, after what it refers to."""
    if request.by_claim:
        yield render.claim_template(request)
    if request.selector:
        yield render.device_class(request)
    yield render.workload(request)


def _print_class(session: Session, name: str, of_class: _ClassOptions) -> None:
    if of_class.any_node and of_class.selectors:
        forbid_together("--any-node", "--node-selector", "one selects some nodes, the other all")
    handler = of_class.handler
    wanted = runtime_class_for(
        session,
        handler or name,
        name=None if handler and name == DEFAULT_HANDLER else name,
        default_memory=of_class.default_memory,
        config=of_class.config,
        cpus=of_class.overhead_cpus or 1,
        selectors=None if of_class.any_node else of_class.selectors,
    )
    print_objects([render.runtime_class(wanted)], session.format)
