"""Print Kubernetes objects: YAML with comments for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Unpack, cast

import click

from vfiomgr.cli.keywords import Keywords, Option, keywords_of
from vfiomgr.cli.options import READING, Format, declared, flag, session_options, typed_options
from vfiomgr.cli.output import print_text
from vfiomgr.errors import forbid_alone, forbid_together
from vfiomgr.guests.model import HOST_FILE
from vfiomgr.kata import kubernetes as render
from vfiomgr.kata.model import DEFAULT_HANDLER
from vfiomgr.kata.workloads import PodKeywords, pods
from vfiomgr.kata.workloads import runtime_class as runtime_class_for
from vfiomgr.snapshot.completion import complete_address
from vfiomgr.snapshot.session import Session, pass_session

if TYPE_CHECKING:
    from vfiomgr.kata.kubernetes import PodRequest


def print_objects(objects: Sequence[Any], output: Format) -> None:
    """Print the input for `kubectl apply -f -`; in JSON several objects are one List."""
    if output == "json":
        import json  # noqa: PLC0415 - slow

        print_text(json.dumps(render.as_json(objects), indent=2) + "\n")
    else:
        print_text(render.as_yaml(objects))


class _ClassOptions(Keywords, total=False):
    """The options of a RuntimeClass."""

    handler: Annotated[
        str | None,
        Option(
            "RuntimeClass: refer to this handler.  [default: its own name]",
            metavar="NAME",
            complete="kata.completion:complete_handler",
        ),
    ]
    default_memory: Annotated[
        str | None,
        Option(
            "RuntimeClass: Kata's default_memory.  [default: as configured, else 8192M]",
            metavar="SIZE",
        ),
    ]
    config: Annotated[
        str | None,
        Option(
            "RuntimeClass: use this Kata configuration.  [default: that of the handler]",
            metavar="FILE",
            complete=HOST_FILE,
        ),
    ]
    overhead_cpus: Annotated[
        int | None,
        Option(
            "RuntimeClass: CPUs of the overhead, like Kata's default_vcpus.  [default: 1]",
            metavar="COUNT",
            least=1,
        ),
    ]
    selectors: Annotated[
        Iterable[str],
        Option(
            "RuntimeClass: select nodes.  [default: katacontainers.io/kata-runtime=true]",
            flags=("--node-selector",),
            metavar="KEY=VALUE",
        ),
    ]
    any_node: Annotated[bool, Option("RuntimeClass: select all nodes.")]


class _AllOptions(PodKeywords, _ClassOptions, total=False):
    """The options of the command."""


@click.command("pod")
@click.argument("addresses", nargs=-1, shell_complete=complete_address)
@declared(PodKeywords)
@flag("--runtimeclass", "is_class", text="Print the RuntimeClass instead of pods.")
@declared(_ClassOptions)
@session_options(*READING)
@pass_session
def pod(
    session: Session, addresses: tuple[str, ...], *, is_class: bool, **options: Unpack[_AllOptions]
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
        if addresses:
            forbid_together("--runtimeclass", "ADDRESS", "a RuntimeClass names no devices")
        for option in typed_options(keywords_of(PodKeywords).keys() - {"runtime_class"}):
            forbid_together("--runtimeclass", option, "a RuntimeClass has no such setting")
        _print_class(session, options["runtime_class"], options)
        return
    _forbid_mixtures(options)
    of_pods = {name: value for name, value in options.items() if name in keywords_of(PodKeywords)}
    wanted = pods(session, *addresses, **cast("PodKeywords", of_pods))
    print_objects([each for one in wanted for each in _objects_for(one)], session.format)


def _forbid_mixtures(options: _AllOptions) -> None:
    """Refuse options that a pod or a VM of KubeVirt does not have."""
    for name, keyword in keywords_of(_ClassOptions).items():
        if options.get(name):
            forbid_alone(keyword.flag, "--runtimeclass", "pods have no such setting")
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


def _print_class(session: Session, name: str, options: _ClassOptions) -> None:
    if options["any_node"] and options["selectors"]:
        forbid_together("--any-node", "--node-selector", "one selects some nodes, the other all")
    handler = options["handler"]
    wanted = runtime_class_for(
        session,
        handler or name,
        name=None if handler and name == DEFAULT_HANDLER else name,
        default_memory=options["default_memory"],
        config=options["config"],
        cpus=options["overhead_cpus"] or 1,
        selectors=None if options["any_node"] else tuple(options["selectors"]),
    )
    print_objects([render.runtime_class(wanted)], session.format)
