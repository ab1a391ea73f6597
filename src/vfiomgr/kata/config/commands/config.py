"""Where `--output` of `kata config` leads: a file of the host that the session is about."""

from __future__ import annotations

import difflib
import os
from typing import TYPE_CHECKING

import click

from vfiomgr.cli.options import guest_mebibytes
from vfiomgr.cli.output import note, print_document, print_text, say, say_text
from vfiomgr.cli.session import Session, complete_address, session_options
from vfiomgr.cli.usage import forbid_together
from vfiomgr.diagnostic import refuse_if_any
from vfiomgr.errors import Refusal, UsageError
from vfiomgr.kata.config import render
from vfiomgr.kata.config.check import check_keys, check_one_by_one, check_together
from vfiomgr.kata.config.commands.bases import (
    Base,
    found_base,
    named_base,
    tell_of_drop_ins,
    tell_of_taken_in,
    with_drop_in,
)
from vfiomgr.kata.config.commands.release import kata_release, read_installation, release_options
from vfiomgr.kata.config.model import DROP_IN, POD_RESOURCES, KataRequest, KataSetup
from vfiomgr.kata.config.plan import plan_config
from vfiomgr.kata.explain.image import refuse_mediated
from vfiomgr.kata.keys import key_table
from vfiomgr.kata.settings import parse
from vfiomgr.passthrough.commands import tell_how_to_bind
from vfiomgr.passthrough.guards import bridge
from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.check.model import Finding
    from vfiomgr.kata.config.model import KataPlan, Plug
    from vfiomgr.kata.model import KataHypervisor, RuntimeName
    from vfiomgr.pci.model import PciAddress, PciDevice
    from vfiomgr.snapshot.model import HostSnapshot


_MACHINE = "/"


def output_path(session: Session, typed: str) -> str:
    """The file on this machine; below --root a path from / on is the host's, and stays below it.

    Raises:
        UsageError: it is no file of that host.
        OSError: the links in it go round in a circle.

    """
    session.require_live(
        "a snapshot holds no files: there is nothing that --output could write",
        "leave --output out, and redirect what is printed: > FILE",
    )
    root = os.path.realpath(session.root)
    if root == _MACHINE:
        return os.path.abspath(typed)
    whole = os.path.abspath(typed)
    if _is_below(whole, root):
        return _located(session, whole[len(root) :])
    if not typed.startswith("/"):
        message = f"--output {typed} is no file of the host below --root {session.root}"
        raise UsageError(
            message, f"name it from / on, as that host does; or redirect what is printed: > {typed}"
        )
    return _located(session, whole)


def _located(session: Session, path: str) -> str:
    """Where a path of the host lies, all links followed as on that host."""
    from vfiomgr.containers.runtimes.facts import followed  # noqa: PLC0415 - printing needs none

    tree = session.tree
    return tree.locate(followed(tree, HostPath(path)))


def _is_below(path: str, root: str) -> bool:
    return path.startswith(f"{root}/")


_FIRMWARE = HostPath("/opt/kata/share/ovmf/OVMF.fd")
_KUBELETS = (
    POD_RESOURCES,
    HostPath("/var/lib/k0s/kubelet/pod-resources/kubelet.sock"),
    HostPath("/var/snap/microk8s/common/var/lib/kubelet/pod-resources/kubelet.sock"),
)


@click.command("config")
@click.argument("addresses", nargs=-1, shell_complete=complete_address)
@release_options
@click.option(
    "--hypervisor",
    type=click.Choice(["qemu", "clh"]),
    default="qemu",
    show_default=True,
    help="QEMU, or Cloud Hypervisor.",
)
@click.option(
    "--plug",
    type=click.Choice(["cold", "hot"]),
    help="Devices before the guest starts, or when a container comes.  [default: cold if it can]",
)
@click.option(
    "--whole",
    metavar="BASE",
    help="Print all of this configuration, changed, instead of a drop-in.",
)
@click.option(
    "--beside",
    metavar="FILE",
    help="The configuration that a drop-in is for.  [default: the one that Kata finds]",
)
@click.option(
    "--output",
    metavar="FILE",
    help="Write it there, whole or not at all; with --root, below that root.",
)
@click.option("--memory", metavar="SIZE", help="default_memory, e.g. 16G.  [default: 8G for GPUs]")
@click.option("--firmware", metavar="FILE", help="OVMF of this Kata, where BARs are large.")
@click.option(
    "--pod-resources/--no-pod-resources",
    default=None,
    help="Whether the kubelet is asked for a pod's devices.  [default: where Kata can]",
)
@click.option(
    "--annotations",
    multiple=True,
    metavar="NAME[,NAME…]",
    help="Annotations of the hypervisor that pods may use.",
)
@click.option(
    "--kernel-params", metavar="TEXT", help="Arguments of the guest's kernel, beside those it has."
)
@session_options()
@click.pass_obj
def config(
    session: Session,
    *,
    addresses: tuple[str, ...],
    kata_version: str | None,
    runtime: RuntimeName | None,
    hypervisor: KataHypervisor,
    plug: Plug | None,
    whole: str | None,
    beside: str | None,
    output: str | None,
    memory: str | None,
    firmware: str | None,
    pod_resources: bool | None,
    annotations: tuple[str, ...],
    kernel_params: str | None,
) -> None:
    """Print configuration of Kata for a guest with ADDRESSES, or with all that a guest can take.

    That is what is bound, and virtual functions that the vendor's own driver has made vGPUs. A
    function comes with its slot, and each needs a root port; Kata has 16. By default it is a
    drop-in for config.d. No key is written that the release does not know.

    \b
    Examples:
      vfiomgr kata config
      vfiomgr kata config 0000:04:00.0 --kata-version 3.31 --runtime rs
      vfiomgr kata config 04:00.0 --plug hot --hypervisor clh --runtime go
      vfiomgr kata config 04:00.0 41:00.0 --memory 16G --firmware /opt/kata/share/ovmf/OVMF.fd
      vfiomgr kata config --annotations default_memory,kernel_params --no-pod-resources
      vfiomgr kata config --beside /etc/kata-containers/gpu/configuration.toml --dry-run \\
        --output /etc/kata-containers/gpu/config.d/50-vfiomgr.toml
      vfiomgr kata config 04:00.0 --kernel-params "pci=realloc" \\
        --whole /opt/kata/share/defaults/kata-containers/configuration-qemu.toml \\
        --output /etc/kata-containers/vfiomgr/kata-vfio/configuration.toml
    """
    if whole is not None and beside is not None:
        forbid_together("--whole", "--beside", "a whole configuration has no drop-in of vfiomgr's")
    target = None if output is None else output_path(session, output)
    host = session.host()
    for text in addresses:
        refuse_mediated(host, text)
    named = [host.device(host.parse_address(text)) for text in addresses]
    refuse_if_any([o for device in named for o in bridge(host, device)], frozenset())
    functions = {d.address: d for device in named for d in host.slot(device)}
    bound = {d.address: d for d in host.devices if host.is_ready_for_guests(d)}
    installation = read_installation(session)
    named_file = whole or beside
    base = named_base(session, named_file, hypervisor, runtime) if named_file else None
    runtime = base.settings.runtime if base is not None else runtime
    release = kata_release(installation, kata_version, runtime)
    base = base or found_base(installation, release, hypervisor)
    wish = KataRequest(
        release=release,
        functions=tuple((functions if addresses else bound).values()),
        hypervisor=hypervisor,
        plug=plug,
        memory_mib=None if memory is None else guest_mebibytes("--memory", memory),
        firmware=_firmware(session, firmware),
        has_pod_resources=pod_resources,
        annotations=tuple(name for text in annotations for name in text.split(",") if name.strip()),
        kernel_params=tuple((kernel_params or "").split()),
    )
    settings = None if base is None else base.settings
    plan = plan_config(host, wish, key_table(), settings, _setup(session))
    text = _rendered(plan, base if whole is not None else None, session)
    if whole is None:
        tell_of_drop_ins(installation, base, plan)
    if base is not None and whole is not None:
        tell_of_taken_in(base)
    elif base is not None:
        _tell_of_configured(base, plan, session)
    path = target or _path(base, is_whole=whole is not None)
    _deliver(session, plan, text, path, target)
    for line in plan.notes:
        note(line)
    _tell_of_devices(host, functions, bound, is_all=not addresses)


def _firmware(session: Session, path: str | None) -> str | None:
    """What was named, as Kata wants it; a note where it is not there."""
    path = _absolute("--firmware", path)
    is_seen = path is not None and session.snapshot is None
    if path is not None and is_seen and not session.tree.exists(HostPath(path)):
        note(f"--firmware {path} is not there yet: Kata starts no guest without it")
    return path


def _absolute(option: str, path: str | None) -> str | None:
    if path is not None and not path.startswith("/"):
        message = f"{option} {path}: Kata wants the whole path"
        raise UsageError(message, f"write it from / on, e.g. {option} {_FIRMWARE}")
    return path


def _setup(session: Session) -> KataSetup:
    """What lies on the host, as far as its tree is there."""
    if session.snapshot is not None:
        return KataSetup()
    tree = session.tree
    kubelets = (path for path in _KUBELETS if tree.exists(path.parent.parent))
    return KataSetup(
        pod_resources=next(kubelets, POD_RESOURCES),
        firmware=_FIRMWARE if tree.exists(_FIRMWARE) else None,
    )


def _rendered(plan: KataPlan, whole: Base | None, session: Session) -> str:
    """The text, which this Kata takes.

    Raises:
        Refusal: the configuration that it is made of has what Kata refuses.

    """
    if whole is None:
        text = render.render_drop_in(plan)
    else:
        file = whole.file
        text = render.render_whole(file.text, file.resolved, whole.drop_ins, plan)
    source = whole.file.path if whole is not None else DROP_IN
    document = parse(text, source)
    findings = check_keys(
        document, plan.release, key_table(), source=source, is_drop_in=whole is None
    )
    blockers = [each for each in findings if each.severity == "blocker" and not _is_foreign(each)]
    if blockers:
        told = tuple((f"{each.title}: {each.why}", each.remedy) for each in blockers)
        message = f"{source}: {'; '.join(reason for reason, _ in told)}"
        raise Refusal(message, "; ".join(dict.fromkeys(way for _, way in told)), told)
    _tell_of_findings(source, findings, session)
    return text


def _tell_of_configured(base: Base, plan: KataPlan, session: Session) -> None:
    """What Kata refuses of the files that are there; what it ignores, where more is asked for."""
    main = (base.file.resolved, base.file.text, False)
    table = key_table()
    for path, text, is_drop_in in (main, *((*each, True) for each in base.drop_ins)):
        findings = check_one_by_one(
            parse(text, path), plan.release, table, source=path, is_drop_in=is_drop_in
        )
        refused = (each for each in findings if each.severity == "blocker")
        _tell_of_findings(path, findings if session.verbose else tuple(refused), session)
    source = f"{base.file.resolved} with its drop-ins and this one"
    document = with_drop_in(base, render.render_drop_in(plan))
    _tell_of_findings(source, check_together(document, plan.release, table, source=source), session)


def _is_foreign(finding: Finding) -> bool:
    """Whether it is about a key that vfiomgr did not write; its user may know more of it."""
    return finding.id == "kata-unknown-key"


def _tell_of_findings(source: str, findings: Iterable[Finding], session: Session) -> None:
    """Print what Kata refuses; the keys that it ignores in one line, unless -v asks for all."""
    ignored = [each for each in findings if each.severity == "warning" and _is_foreign(each)]
    short = () if session.verbose else ignored
    for each in findings:
        if each.severity != "info" and each not in short:
            note(f"{source}: {each.title}: {each.why}; {each.remedy}")
        elif each.severity == "info" and session.verbose:
            note(f"{source}: {each.title}: {each.why}")
    if short:
        names = ", ".join(each.title.rpartition(" know ")[2] for each in short)
        note(f"{source} has keys that this Kata ignores (-v tells more): {names}")


def _path(base: Base | None, *, is_whole: bool) -> str:
    """Where the text belongs, as far as that is known."""
    if is_whole:
        return ""
    return base.file.drop_in_directory / DROP_IN if base is not None else f"config.d/{DROP_IN}"


def _deliver(session: Session, plan: KataPlan, text: str, path: str, output: str | None) -> None:
    before = None if output is None else _read(output)
    _refuse_over(before, text, path)
    is_changed = text != before
    difference = "" if output is None else _difference(before or "", text, path)
    if output is not None and is_changed and not session.dry_run:
        _write(output, text)
    if session.format != "table":
        body = _body(plan, text, path)
        if output is not None:
            body |= {"is_changed": is_changed}
        print_document("KataConfiguration", body, session.format)
    elif output is None:
        print_text(text)
    elif not is_changed:
        say(f"{path}: nothing to do")
    elif session.dry_run:
        say_text(difference)
    else:
        say(f"{path}: written")


def _refuse_over(before: str | None, text: str, path: str) -> None:
    """Make sure that a drop-in takes the place of none but vfiomgr's own.

    Raises:
        Refusal: a file is there that is another's, or a whole configuration.

    """
    if not render.is_drop_in(text) or before is None or not before.strip():
        return
    if not render.is_drop_in(before):
        message = f"{path} is there, and no drop-in of vfiomgr's: all that it says would be lost"
        hint = f"--output …/config.d/{DROP_IN}; --whole {path} changes a configuration and keeps it"
        raise Refusal(message, hint)


def _body(plan: KataPlan, text: str, path: str) -> dict[str, object]:
    return {
        "path": path,
        "text": text,
        "kata_version": str(plan.release.version),
        "runtime": plan.release.runtime,
        "hypervisor": plan.hypervisor,
        "plug": plan.plug,
        "root_ports": plan.value("pcie_root_port"),
        "devices": [str(function.address) for function in plan.functions],
        "keys": [
            {"table": ".".join(entry.table), "key": entry.key, "value": entry.value}
            for entry in plan.entries
        ],
        "notes": plan.notes,
    }


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace", newline="") as file:
            return file.read()
    except OSError:
        return None


def _write(path: str, text: str) -> None:
    """Exchange the file as a whole; its directory is made where there is none."""
    from vfiomgr.host.rewrite import rewrite  # noqa: PLC0415 - printing needs none

    rewrite(path, None, text.encode(), makes_parents=True)


def _difference(before: str, after: str, path: str) -> str:
    old, new = (text.splitlines(keepends=True) for text in (before, after))
    return "".join(difflib.unified_diff(old, new, path, path))


def _tell_of_devices(
    host: HostSnapshot,
    functions: dict[PciAddress, PciDevice],
    bound: dict[PciAddress, PciDevice],
    *,
    is_all: bool,
) -> None:
    """What of the devices no guest can take yet, and what never can."""
    if is_all and not bound:
        note(
            "this is for no device yet, since nothing is bound: vfiomgr bind ADDRESS, or vfiomgr "
            "vgpu create, and then again"
        )
    tell_how_to_bind(host, [d for d in functions.values() if d.address not in bound])
    if any(vgpu.uuid is not None for vgpu in host.vgpus):
        note(
            "vGPUs that are mediated devices are left out: Kata cannot attach them; "
            "libvirt can, with vfiomgr libvirt hostdev UUID"
        )
