"""`vfiomgr node run`, and the scanning process that it starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from typing import Annotated, Any, Unpack

import click
from msgspec.structs import replace

from vfiomgr.cli.garbage import collect_as_usual
from vfiomgr.cli.keywords import Keywords, Option, fields_of
from vfiomgr.cli.options import (
    Seconds,
    complete_file,
    declared,
    directory_option,
    flag,
    session_options,
)
from vfiomgr.cli.output import note
from vfiomgr.containers.resource_names import DEFAULT_PREFIX, name_resources
from vfiomgr.errors import HostError, UsageError, forbid_alone
from vfiomgr.host.installation import optional
from vfiomgr.library import Host
from vfiomgr.node.messages import (
    KUBELET_DIRECTORY,
    PLUGIN_DIRECTORY,
    POD_RESOURCES,
    AgentSettings,
    DraSettings,
    EventSettings,
    Settings,
)
from vfiomgr.node.model import SERVICE_ACCOUNT, Consumer, NodeSettings
from vfiomgr.persistence.installed_layout import FILE
from vfiomgr.snapshot.session import Session, pass_session, session_of
from vfiomgr.users.node_agent import CONTROL

_NAMES = NodeSettings()


class NamingOptions(Keywords, total=False):
    """How the agent names resources, and for whom it writes them."""

    prefix: Annotated[
        str,
        Option(
            f"Domain of the resource names.  [default: {DEFAULT_PREFIX}]",
            flags=("--resource-prefix",),
            metavar="DOMAIN",
            default=DEFAULT_PREFIX,
            shows_default=False,
        ),
    ]
    aliases: Annotated[
        Iterable[str],
        Option(
            "Name of the resource for a PCI ID, a vGPU type or a default name.",
            flags=("--alias",),
            metavar="DEVICES=NAME",
            parse=_parse_alias,
        ),
    ]
    consumer: Annotated[
        Consumer,
        Option(
            "Who receives the devices: `default` serves Kata and plain containers.",
            default=_NAMES.consumer,
            shows_default=False,
        ),
    ]


def node_settings(options: NamingOptions, *, resets: bool = False) -> NodeSettings:
    """The settings of a user.

    Raises:
        UsageError: the prefix or an alias is invalid.
    """
    fields = fields_of(NamingOptions, options)
    aliases = dict(fields.pop("aliases", ()))
    settings = NodeSettings(aliases=aliases, resets=resets, **fields)
    name_resources((), settings)
    return settings


def _parse_alias(alias: str) -> tuple[str, str]:
    devices, equals, name = alias.partition("=")
    if not (devices and equals and name and alias.isprintable()):
        message = f"not an alias: {alias!r}"
        raise UsageError(message, "use DEVICES=NAME, e.g. 10de:2235=a40")
    return devices, name


def arguments_of(settings: NodeSettings) -> tuple[str, ...]:
    """The arguments with which `vfiomgr node run` names resources like these settings."""
    words: list[str] = []
    if settings.prefix != _NAMES.prefix:
        words += ["--resource-prefix", settings.prefix]
    for devices, name in settings.aliases.items():
        words += ["--alias", f"{devices}={name}"]
    if settings.consumer != _NAMES.consumer:
        words += ["--consumer", settings.consumer]
    return tuple(words)


_PORT = "KUBERNETES_SERVICE_PORT"
_AGENT = AgentSettings(root="", plugin_directory="", pod_resources="", control="")


_optional = partial(optional, verb="run the agent", extra="node")


def _seconds(name: str, default: float, text: str) -> Callable[[Any], Any]:
    return click.option(
        name,
        type=Seconds(),
        metavar="SECONDS",
        default=default,
        help=f"{text}  [default: {default:g}]",
    )


def _complete_layout(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    """The layouts of the node."""
    node = click.Context(context.command)
    node.params["file"] = session_of(context).files.locate(FILE)
    layouts = import_module("vfiomgr.layout.commands.changes")  # slow, by pydantic
    found: list[str] = layouts.complete_layout(node, parameter, incomplete)
    return found


@click.command("run")
@declared(NamingOptions)
@flag("--reset", "resets", text="Reset devices before a container starts with them.")
@click.option(
    "--layout",
    metavar="NAME",
    shell_complete=_complete_layout,
    help=f"Name of the layout in {FILE} whose resources are offered.  [default: installed]",
)
@click.option(
    "--metrics",
    metavar="ADDRESS",
    help="Serve /metrics, /healthz and /readyz on HOST:PORT or unix:PATH.",
)
@directory_option(
    "--plugin-directory",
    text=f"The kubelet's directory of device plugins.  [default: {PLUGIN_DIRECTORY}]",
)
@click.option(
    "--pod-resources",
    metavar="SOCKET",
    shell_complete=complete_file,
    help=f"The kubelet's socket of pod resources.  [default: {POD_RESOURCES}]",
)
@directory_option(
    "--events",
    text="Write events of the node with the token and ca.crt in DIR, e.g. of a service account.",
)
@flag("--dra", "has_dra", text="Also serve ResourceClaims, as driver vfiomgr.io.")
@flag(
    "--binding-conditions",
    "binds_early",
    text="With --dra: bind devices before the scheduler places their pods (Kubernetes 1.36).",
)
@directory_option(
    "--credentials", text=f"The token and ca.crt for --dra.  [default: {SERVICE_ACCOUNT}]"
)
@directory_option(
    "--kubelet-root", text=f"The kubelet's --root-dir, for --dra.  [default: {KUBELET_DIRECTORY}]"
)
@_seconds("--scan-interval", _AGENT.scan.interval, "Least time between scans without events.")
@_seconds("--pods-interval", _AGENT.pods_interval, "Time between questions about pods.")
@_seconds("--debounce", _AGENT.debounce, "Time until a device is reported as unhealthy.")
@flag("--once", text="Only write the CDI specifications and the labels of the node.")
@session_options("root", "verbose")
@pass_session
def run(
    session: Session,
    *,
    resets: bool,
    layout: str | None,
    metrics: str | None,
    plugin_directory: str | None,
    pod_resources: str | None,
    events: str | None,
    has_dra: bool,
    binds_early: bool,
    credentials: str | None,
    kubelet_root: str | None,
    scan_interval: float,
    pods_interval: float,
    debounce: float,
    once: bool,
    **names: Unpack[NamingOptions],
) -> None:
    """Serve the devices of this node to the kubelet.

    Devices on VFIO drivers and vGPUs become extended resources, e.g. vfiomgr.io/GA102GL_A40.
    Nothing is bound: prepare the node with `vfiomgr apply` or `vfiomgr bind`. If rules of the
    installed layout have a resource, only their devices are offered. The agent runs until it is
    interrupted; SIGHUP repeats the scan.

    \b
    Examples:
      vfiomgr node run
      vfiomgr node run --metrics :9478
      vfiomgr node run --layout kata-node
      vfiomgr node run --events /var/run/secrets/kubernetes.io/serviceaccount
      vfiomgr node run --dra
      vfiomgr node run --resource-prefix example.com --alias 10de:2235=a40
    """
    node = node_settings(names, resets=resets)
    scan = Settings(node, scan_interval, layout)
    if once:
        _write_once(session, scan)
        return
    dra = None
    if not has_dra:
        for option, value in (
            ("--credentials", credentials),
            ("--kubelet-root", kubelet_root),
            ("--binding-conditions", binds_early or None),
        ):
            if value is not None:
                forbid_alone(option, "--dra", "only the driver for claims needs it")
    else:
        kubelet = kubelet_root or session.tree.locate(KUBELET_DIRECTORY)
        dra = _dra(credentials or SERVICE_ACCOUNT, kubelet)
        dra = replace(dra, binds_early=binds_early)
        scan = replace(scan, dra_node=dra.node)
    settings = AgentSettings(
        root=session.tree.root,
        plugin_directory=plugin_directory or session.tree.locate(PLUGIN_DIRECTORY),
        pod_resources=pod_resources or session.tree.locate(POD_RESOURCES),
        control=session.tree.locate(CONTROL),
        metrics=metrics,
        scan=scan,
        events=None if events is None else _events(events),
        dra=dra,
        debounce=debounce,
        pods_interval=pods_interval,
    )
    collect_as_usual()
    _optional("vfiomgr.node.agent").run(settings, note)


def _events(directory: str) -> EventSettings:
    """How to write events.

    Raises:
        UsageError: as in `_cluster`.
    """
    server, node = _cluster(directory, "--events")
    return EventSettings(directory, server, node)


def _dra(directory: str, kubelet: str) -> DraSettings:
    """How to serve claims; in a pod, its UID is part of the names of sockets.

    Raises:
        UsageError: as in `_cluster`.
    """
    server, node = _cluster(directory, "--dra")
    _optional("vfiomgr.node.dra.driver")
    return DraSettings(kubelet, directory, server, node, os.environ.get("POD_UID", ""))


def _cluster(directory: str, option: str) -> tuple[str, str]:
    """The API server, which is known from the environment of a pod, and the name of the node.

    Raises:
        UsageError: this is no pod, httpx is not installed, or the credentials cannot be read.
    """
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get(_PORT, "443")
    if not host:
        message = f"{option}: the API server is unknown: KUBERNETES_SERVICE_HOST is not set"
        raise UsageError(message, f"in a pod it is; elsewhere set it and {_PORT}")
    if not port.isdecimal():
        message = f"{option}: {_PORT} is not a number: {port}"
        raise UsageError(message, "set it to the port of the API server, or remove it")
    node = os.environ.get("NODE_NAME") or os.uname().nodename.lower()
    _optional("vfiomgr.node.api_server")
    import_module("vfiomgr.node.credentials").require_usable(directory, option)
    return f"https://{f'[{host}]' if ':' in host else host}:{port}", node


@click.command("scan", hidden=True)
@session_options("root")
@pass_session
def scan(session: Session) -> None:
    """Scan the host for an agent, which starts this command itself."""
    render = _optional("vfiomgr.node.metrics").render
    host = _host_of(session)
    collect_as_usual()
    try:
        import_module("vfiomgr.node.scanner").serve(
            host, sys.stdin.fileno(), sys.stdout.fileno(), render
        )
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(0)  # the agent has ended


_of_layout = click.option("--layout", metavar="NAME", help="Name of the layout of the node.")


@click.command("create", hidden=True)
@flag("--bind-only", text="Only bind devices of the layout, and return them.")
@_of_layout
@session_options("root")
@pass_session
def create(session: Session, *, bind_only: bool, layout: str | None) -> None:
    """Create vGPUs and bind devices for an agent, which starts this command itself."""
    vgpus = import_module("vfiomgr.node.dra.vgpus")
    kind = vgpus.Vgpus
    if bind_only:
        binder = import_module("vfiomgr.node.dra.binder")
        vars(session)["tree"] = binder.PodTree(session.tree.root)
        kind = binder.Binder
    made = kind(_host_of(session))
    if bind_only:
        made.layout = layout
    collect_as_usual()
    try:
        vgpus.serve(made, sys.stdin.buffer, sys.stdout.fileno())
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(0)  # the agent has ended


@click.command("bind", hidden=True)
@_of_layout
@session_options("root")
@pass_session
def bind(session: Session, *, layout: str | None) -> None:
    """Bind devices for the claims of an agent in another pod, which may not write /sys."""
    import_module("vfiomgr.node.dra.binder").run(session.tree, layout)


def _host_of(session: Session) -> Host:
    """The host of a session, which only has notes for the log."""
    host = Host(deadline=session.timeout, on_note=note)
    session.share_with(host)
    return host


def _write_once(session: Session, settings: Settings) -> None:
    """Write what containers need at boot, before a kubelet restores its pods."""
    scanner = import_module("vfiomgr.node.scanner").Scanner(_host_of(session))
    scanner.settings = settings
    report = scanner.scan()
    if report.error:
        message = f"cannot scan the host: {report.error}"
        raise HostError(message)
    for resource in report.inventory.resources:
        note(f"{resource.name}: {len(resource.units)}")
    if report.inventory.on_demand:
        note(f"bound on demand by claims: {len(report.inventory.on_demand)}")
    elif not report.inventory.resources:
        see = session.command("list --all")
        note(f"no device is ready for pods; see the devices and their drivers: {see}")
