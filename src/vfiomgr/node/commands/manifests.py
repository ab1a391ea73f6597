"""`vfiomgr node manifests`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Unpack

import click

from vfiomgr.cli.options import (
    READING,
    declared,
    directory_option,
    file_option,
    flag,
    session_options,
)
from vfiomgr.cli.output import note, print_text
from vfiomgr.diagnostic import refuse
from vfiomgr.documents.text import source_of, text_of
from vfiomgr.errors import forbid_alone, forbid_together
from vfiomgr.kata.kubernetes import parse_selector
from vfiomgr.kata.model import KUBELET_ROOT
from vfiomgr.kata.pod_commands import print_objects
from vfiomgr.layout.commands.changes import layout_option
from vfiomgr.layout.document import choose_layout, read_layouts
from vfiomgr.node.commands.run import NamingOptions, arguments_of, node_settings
from vfiomgr.node.manifests import (
    AGENT,
    BINDING_CONDITIONS,
    DISTRIBUTIONS,
    IMAGE,
    NAMESPACE,
    RENDERERS,
    ManifestRequest,
    NodeLayout,
    found_kubelet_root,
    named_kubelet_root,
    render_agent,
)
from vfiomgr.node.manifests import manifests as manifests_of
from vfiomgr.paths import HostPath
from vfiomgr.persistence.named import own_program
from vfiomgr.snapshot.session import Session, pass_session

_SELINUX = HostPath("/sys/fs/selinux/enforce")


@click.command("manifests")
@click.option(
    "--distribution",
    type=click.Choice(DISTRIBUTIONS),
    help="Use the kubelet's paths in this distribution.  [default: as on this host]",
)
@directory_option("--kubelet-root", text="Use this --root-dir of the kubelet.")
@click.option(
    "--image",
    metavar="IMAGE",
    help="Run this image in all containers.  [default: localhost/vfiomgr-node:VERSION]",
)
@click.option(
    "--namespace", default=NAMESPACE, show_default=True, metavar="NAME", help="Set the namespace."
)
@click.option(
    "--node-selector",
    "selectors",
    multiple=True,
    metavar="KEY=VALUE",
    help="Select the prepared nodes by label.  [default: all Linux nodes]",
)
@flag("--selinux", text="Use SELinux's type for device plugins, on nodes with SELinux.")
@flag("--events", text="Let the agent write events of its node, with a token for that.")
@flag(
    "--dra",
    text="Add the DRA driver: the agent publishes devices and prepares claims, with a token.",
)
@flag(
    "--binding-conditions",
    text="With --dra: let the agent bind devices before it gets their pods; it watches pods.",
)
@flag(
    "--binder",
    text="With --dra: add pods with the rights to bind devices for claims (state: on-demand).",
)
@flag(
    "--stop-gpu-operator",
    "gpu_operator",
    text="Let the agent stop the GPU Operator's monitoring during a bind (stop: gpu-operator).",
)
@flag(
    "--no-daemon-set",
    "as_services",
    text="With --dra: leave the DaemonSet out, where the agents are services.",
)
@file_option(
    "--with-layout", "file", text="Add privileged pods that apply the layout in FILE to the nodes."
)
@layout_option
@click.option(
    "--unit",
    type=click.Choice(tuple(RENDERERS)),
    help="Print this systemd unit instead, for an agent without a container.",
)
@declared(NamingOptions)
@session_options(*READING)
@pass_session
def manifests(
    session: Session,
    *,
    distribution: str | None,
    kubelet_root: str | None,
    image: str | None,
    namespace: str,
    selectors: tuple[str, ...],
    selinux: bool,
    events: bool,
    dra: bool,
    binding_conditions: bool,
    binder: bool,
    gpu_operator: bool,
    as_services: bool,
    file: str | None,
    name: str | None,
    unit: str | None,
    **names: Unpack[NamingOptions],
) -> None:
    """Print the Kubernetes objects that run the agent on nodes.

    The pods of the agent are unprivileged and need no rights in the Kubernetes API, except with
    --events and --dra. They offer the devices that are ready; a layout prepares them, either
    installed on the nodes (vfiomgr layout install) or applied by separate pods (--with-layout).

    The options that name resources must be the same for the agent and for the unit that writes the
    CDI specifications at boot.

    \b
    Examples:
      vfiomgr node manifests --image registry.example/vfiomgr-node:1 | kubectl apply -f -
      vfiomgr node manifests --distribution k0s --node-selector gpu=vfio
      vfiomgr node manifests --image registry.example/vfiomgr-node:1 --with-layout host.yaml
      vfiomgr node manifests --image registry.example/vfiomgr-node:1 --events
      vfiomgr node manifests --image registry.example/vfiomgr-node:1 --dra
      vfiomgr node manifests --image registry.example/vfiomgr-node:1 --dra --binder
      vfiomgr node manifests --kubelet-root /srv/kubelet --with-layout fleet.yaml --layout kata-node
      vfiomgr node manifests --unit vfiomgr-node-cdi.service --alias 10de:2235=a40
      vfiomgr node manifests --unit vfiomgr-node.service --dra
      vfiomgr node manifests --dra --no-daemon-set | kubectl apply -f -
    """
    arguments = arguments_of(node_settings(names))
    if binding_conditions and not dra:
        forbid_alone(BINDING_CONDITIONS, "--dra", "only claims have such conditions")
    if as_services:
        _forbid_daemon_set(dra=dra)
    if distribution is not None and kubelet_root is not None:
        forbid_together("--distribution", "--kubelet-root", "both set the kubelet's directory")
    if unit is not None:
        has_claims = dra and unit == AGENT.name
        _forbid_objects(has_claims=has_claims)
        if has_claims:
            root = named_kubelet_root(distribution, kubelet_root) or _own_kubelet_root(session)
            more = (BINDING_CONDITIONS,) if binding_conditions else ()
            print_text(render_agent(_program(), (*arguments, *more), root, events=events))
        else:
            print_text(RENDERERS[unit](_program(), arguments))
        return
    for option, is_given in (("--binder", binder), ("--stop-gpu-operator", gpu_operator)):
        if is_given and not dra:
            forbid_alone(option, "--dra", "only the driver for claims binds devices")
    layout = _layout(file, name)
    usual = KUBELET_ROOT if as_services else None  # no object of theirs has it
    root = named_kubelet_root(distribution, kubelet_root) or usual or _own_kubelet_root(session)
    wanted = ManifestRequest(
        image=IMAGE if image is None else image,
        namespace=namespace,
        kubelet_root=root,
        node_selector=tuple(parse_selector("--node-selector", text) for text in selectors),
        selinux=selinux,
        layout=layout,
        events=events,
        dra=dra,
        binding_conditions=binding_conditions,
        binder=binder,
        gpu_operator=gpu_operator,
        arguments=arguments,
    )
    if image is None and not as_services:
        note(
            f"the image {IMAGE} is not in a registry; pass --image with a name that nodes can pull"
        )
    if not selinux and session.snapshot is None and session.files.exists(_SELINUX):
        note("SELinux is in use: pass --selinux if the agent cannot create its socket")
    left_out = {"DaemonSet"} if as_services else set()
    objects = [each for each in manifests_of(wanted) if each["kind"] not in left_out]
    print_objects(objects, session.format)


_FOR_CLAIMS = ("distribution", "kubelet_root", "dra", "binding_conditions", "events")
"""Options of objects that the unit of an agent with claims needs too."""
_OF_PODS = ("image", "file", "selectors", "binder")
_OF_OBJECTS = (*_FOR_CLAIMS, *_OF_PODS, "selinux", "gpu_operator", "as_services", "name")


def _given(names: Iterable[str]) -> Iterator[str]:
    """The options that are given, as help shows them, of parameters of the command."""
    context = click.get_current_context()
    for option in context.command.params:
        if option.name in set(names) and context.params[option.name]:
            yield option.opts[0]


def _forbid_objects(*, has_claims: bool) -> None:
    """Reject options for objects where a unit is printed."""
    for option in _given(set(_OF_OBJECTS).difference(_FOR_CLAIMS if has_claims else ())):
        forbid_together("--unit", option, "a unit runs the agent without Kubernetes objects")


def _forbid_daemon_set(*, dra: bool) -> None:
    """Reject options of DaemonSets where none is printed."""
    if not dra:
        forbid_alone("--no-daemon-set", "--dra", "there are no other objects")
    for option in (option for name in _OF_PODS for option in _given([name])):
        forbid_together("--no-daemon-set", option, "it is for a DaemonSet")


def _program() -> str:
    """The command of this vfiomgr.

    Raises:
        Refusal: it is not installed, or users other than root could replace it.
    """
    program = own_program()
    if program is None:
        message = "cannot write a systemd unit: vfiomgr is not installed as a command"
        refuse(
            "program-not-installed", "", message, "install vfiomgr in /opt/vfiomgr (see README.md)"
        )
    return program


def _own_kubelet_root(session: Session) -> HostPath:
    """The kubelet's directory on the host, or else the usual one."""
    root = None if session.snapshot is not None else found_kubelet_root(session.files)
    if root is None:
        note(f"kubelet not found; assuming {KUBELET_ROOT} (set --distribution or --kubelet-root)")
    return root or KUBELET_ROOT


def _layout(file: str | None, name: str | None) -> NodeLayout | None:
    """The layout to apply, which is checked here rather than on each node."""
    if file is None:
        if name is not None:
            forbid_alone("--layout", "--with-layout", "it chooses a layout of the file")
        return None
    text = text_of(file, "the layout file")
    choose_layout(read_layouts(text, source_of(file)), name)
    return NodeLayout(text, name)
