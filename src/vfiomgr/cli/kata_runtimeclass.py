"""`vfiomgr kata runtimeclass`."""

from __future__ import annotations

import click

from vfiomgr.adapters.kubernetes import render
from vfiomgr.cli import kata_situation as gather
from vfiomgr.cli.kata_manifests import print_objects
from vfiomgr.cli.output import note
from vfiomgr.cli.parameters import WholeNumber, guest_mebibytes
from vfiomgr.cli.session import Session, session_options
from vfiomgr.cli.usage import forbid_together
from vfiomgr.errors import InvalidDocument
from vfiomgr.model.kata import DEFAULT_HANDLER
from vfiomgr.model.kubernetes import (
    RuntimeClassWish,
    parse_selector,
    require_label,
    require_subdomain,
)
from vfiomgr.planner.kata.config import GPU_MEMORY_MIB
from vfiomgr.planner.kata.sizing import recommended_overhead_mib

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
    wish = RuntimeClassWish(
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
