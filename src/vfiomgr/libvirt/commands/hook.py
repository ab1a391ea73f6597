"""`vfiomgr libvirt hook …`: bind devices when their guest starts, and unbind them afterwards."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click

from vfiomgr.cli.options import CHANGING, flag, session_options
from vfiomgr.cli.output import note, print_document, say
from vfiomgr.diagnostic import refuse
from vfiomgr.documents.text import STANDARD_INPUT
from vfiomgr.documents.xml_text import parse
from vfiomgr.engine.changes import change, host_of
from vfiomgr.errors import LibvirtFailed, VfiomgrError, forbid_alone, forbid_together
from vfiomgr.host.selinux import HOOKS_BOOLEAN
from vfiomgr.libvirt.commands.connection import (
    complete_domain,
    connect_option,
    connected,
    is_uri_typed,
    require_running_host,
)
from vfiomgr.libvirt.guest_hook import prepare_guest, release_guest
from vfiomgr.libvirt.hook import (
    PREFIX,
    PREPARE,
    RELEASE,
    InstallHook,
    UninstallHook,
    render_settings,
)
from vfiomgr.libvirt.model import NAMESPACE, Domain, HookSettings, KnownDomain
from vfiomgr.libvirt.preflight.selinux import read_hook_security
from vfiomgr.libvirt.xml.read import domain_of, hook_settings, read_xml, settings_of
from vfiomgr.paths import SCRIPT
from vfiomgr.persistence.named import own_program
from vfiomgr.snapshot.session import Session, pass_session

if TYPE_CHECKING:
    from vfiomgr.libvirt.client.connection import Connection


def read_guest(xml: bytes, name: str) -> Domain | None:
    """The domain; None if it never enabled the hook, which is found without parsing the XML."""
    if NAMESPACE.encode() not in xml:
        return None
    root = parse(xml, name)
    return domain_of(root) if hook_settings(root) is not None else None


def asked_of_hook(element: str | None) -> HookSettings | None:
    """What the element of vfiomgr's namespace in a domain's metadata enables the hook for."""
    if element is None:
        return None
    return settings_of(parse(element.encode(), "the metadata of vfiomgr"))


_DOMAINS = click.argument(
    "domains", nargs=-1, metavar="[DOMAIN]...", shell_complete=complete_domain
)


@click.group("hook")
def hook() -> None:
    """Bind devices when their guest starts, unbind them after.

    libvirt runs the hook. It acts only for domains for which it is enabled, and only on devices
    with managed='no' that are on a host driver, and on vGPUs that are defined but not active.

    \b
    Examples:
      vfiomgr libvirt hook install          # the hook itself, once
      vfiomgr libvirt hook install win      # enable it for a domain
      vfiomgr libvirt hook uninstall win
    """


@hook.command("install")
@_DOMAINS
@flag("--release", text="Have the desktop release displays (bind --release).")
@flag("--end-sessions", text="With --release: end sessions, also if compositors can close it.")
@flag("--isolate-cpus", text="Keep the host off the guest's CPUs.")
@flag("--hugepages", text="Allocate the guest's huge pages.")
@flag("--interrupts", text="Keep its devices' interrupts on its CPUs.")
@connect_option
@session_options(*CHANGING)
@pass_session
def install(session: Session, *, domains: tuple[str, ...], uri: str, **settings: bool) -> None:
    """Install the hook, or enable it for domains.

    Without DOMAIN the hook itself is installed, which libvirt 6.5 and later runs:
    /etc/libvirt/hooks/qemu.d/50-vfiomgr. Other hook scripts are left alone. It does nothing for a
    guest until it is enabled for its domain.

    With DOMAIN it is enabled for that domain, from its next start on. The setting is in the
    domain's metadata, so it stays with the domain when it is renamed, exported or undefined. The
    hook has the safety checks of `vfiomgr bind` (the console display, a mounted disk, a device in
    use); if it refuses, the guest does not start.

    With --isolate-cpus the host's processes leave the CPUs that the guest is pinned to while it
    runs. With --hugepages its huge pages are allocated at the start, and freed when it ends; if
    there is too little memory, the guest does not start. With --interrupts a service moves the
    interrupts of its PCI devices to its CPUs as its drivers enable them.

    With --release the desktop releases the displays of the guest before each start, without a
    question: sessions that use them end. It has them back when the guest ends, or never started.

    \b
    Examples:
      vfiomgr libvirt hook install --dry-run
      vfiomgr libvirt hook install
      vfiomgr libvirt hook install win
      vfiomgr libvirt hook install win --release
      vfiomgr libvirt hook install win --release --end-sessions
      vfiomgr libvirt hook install win --isolate-cpus --hugepages --interrupts
      vfiomgr libvirt hook install win --connect qemu+ssh://node7/system
    """
    if settings["end_sessions"] and not settings["release"]:
        forbid_alone("--end-sessions", "--release", "no session uses a free device")
    if domains:
        _mark(session, uri, domains, HookSettings(**settings))
        return
    for name in (name for name, is_on in settings.items() if is_on):
        option = f"--{name.replace('_', '-')}"
        forbid_alone(option, "DOMAIN", "it is a setting of a domain")
    _require_here()
    change(session, InstallHook(own_program()))
    known = None if session.snapshot is not None else read_hook_security(session.tree)
    if known is not None and known.may_run is False:
        note(f"SELinux does not let virtqemud run the hook: setsebool -P {HOOKS_BOOLEAN} on")


@hook.command("uninstall")
@_DOMAINS
@flag("--all", "every", text="Uninstall it even if domains use it.")
@connect_option
@session_options(*CHANGING)
@pass_session
def uninstall(session: Session, *, domains: tuple[str, ...], every: bool, uri: str) -> None:
    """Uninstall the hook, or disable it for domains.

    Without DOMAIN the hook that `hook install` wrote is removed; this is refused while it is
    enabled for a domain. With DOMAIN it is disabled for that domain, from its next start on.

    \b
    Examples:
      vfiomgr libvirt hook uninstall
      vfiomgr libvirt hook uninstall --all    # even if it is enabled for domains
      vfiomgr libvirt hook uninstall win
      vfiomgr libvirt hook uninstall win --connect qemu+ssh://node7/system
    """
    if domains:
        if every:
            forbid_together("--all", "DOMAIN", "it uninstalls the hook itself")
        _mark(session, uri, domains, None)
        return
    _require_here()
    if not every and session.is_live and _is_here(session, uri) and session.tree.exists(SCRIPT):
        _require_unused(uri)
    change(session, UninstallHook())


def _require_unused(uri: str) -> None:
    """Refuse to uninstall the hook while it is enabled for domains."""
    remedy = "to uninstall it for all domains: vfiomgr libvirt hook uninstall --all"
    try:
        with connected(uri, read_only=True) as connection:
            names = [
                name
                for name in connection.domain_names()
                if asked_of_hook(connection.metadata(name, NAMESPACE)) is not None
            ]
    except VfiomgrError as error:
        message = f"cannot check which domains use the hook: {error.message}"
        raise LibvirtFailed(message, remedy) from error
    if names:
        message = f"cannot uninstall the hook: it is enabled for {', '.join(names)}"
        of_domains = f"vfiomgr libvirt hook uninstall {shlex.join(names)}"
        refuse("hook-enabled", "", message, f"to disable it for domains: {of_domains}", remedy)


def _require_here() -> None:
    """Reject --connect without a domain: the hook is a file of the inspected host."""
    if is_uri_typed(click.get_current_context()):
        forbid_alone("--connect", "DOMAIN", "the hook itself is a file of this host")


def _mark(
    session: Session, uri: str, domains: tuple[str, ...], settings: HookSettings | None
) -> None:
    require_running_host(session)
    element = None if settings is None else render_settings(settings)
    state = "enabled" if element else "disabled"
    with connected(uri, read_only=session.dry_run) as connection:
        names = [connection.state(domain).name for domain in domains]
        is_there = {name: asked_of_hook(connection.metadata(name, NAMESPACE)) for name in names}
        changing = [name for name in is_there if is_there[name] != settings]
        if not session.dry_run:
            _set(connection, changing, element)
        tunes = settings is not None and (settings.isolate_cpus or settings.hugepages)
        asked = [] if element is None or tunes else list(is_there)
        idle = [name for name in asked if not _has_work(connection.domain(name))]
    if settings is not None and settings.release:
        note("at each start, sessions that use a display of the guest end without a question")
    if element and _is_here(session, uri) and not session.tree.exists(SCRIPT):
        note("the hook is not installed yet; install it with: vfiomgr libvirt hook install")
    for name in idle:
        note(
            f"the hook has nothing to do for {name}: no device with managed='no', no vGPU; add "
            f"one with: vfiomgr libvirt edit {shlex.quote(name)} --add ADDRESS"
        )
    if session.format != "table":
        body = {"state": state, "changed": changing, "domains": list(is_there)}
        print_document("HookOutcome", body, session.format)
        return
    would = "would be " if session.dry_run else ""
    for name in is_there:
        so = f"{would}{state}" if name in changing else f"already {state}"
        say(f"{name}: the hook is {so}" if not would else f"{name}: the hook {so}")


def _is_here(session: Session, uri: str) -> bool:
    """Whether that libvirt runs hooks on the inspected host."""
    return session.snapshot is None and urlsplit(uri).hostname is None


def _has_work(domain: KnownDomain) -> bool:
    """Whether the next start uses a device that libvirt does not manage; true if unknown."""
    start = domain.defined or domain.running
    return start is None or any(h.kind != "other" and not h.managed for h in start.hostdevs)


def _set(connection: Connection, names: list[str], element: str | None) -> None:
    for name in names:
        connection.set_metadata(name, element, PREFIX, NAMESPACE)


@hook.command("run", hidden=True, context_settings={"ignore_unknown_options": True})
@click.argument("domain")
@click.argument("operation")
@click.argument("rest", nargs=-1)
@session_options(*CHANGING)
@pass_session
def run(session: Session, *, domain: str, operation: str, rest: tuple[str, ...]) -> None:  # noqa: ARG001 - libvirt passes more
    """Run the hook, with the domain's XML on standard input.

    The installed script calls it. Status 0 lets the guest start. All messages are on stderr, where
    libvirt takes its own message from.

    \b
    Examples:
      virsh dumpxml win | vfiomgr libvirt hook run win prepare begin -
      virsh dumpxml win | vfiomgr libvirt hook run win release end -
    """
    acts = {PREPARE: (prepare_guest, "bound"), RELEASE: (release_guest, "returned to the host")}
    if operation not in acts:
        return
    guest = read_guest(read_xml(STANDARD_INPUT), domain)
    if guest is None:
        return
    act, what = acts[operation]
    names = act(host_of(session), guest)
    for name in names:
        note(f"vfiomgr: {name} {what} for {guest.name}")
