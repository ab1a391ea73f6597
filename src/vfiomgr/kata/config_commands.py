"""`vfiomgr kata config`."""

from __future__ import annotations

import os
from typing import Unpack

import click

from vfiomgr.cli.options import READING, declared, session_options
from vfiomgr.cli.output import note, print_document, print_text, say, say_text
from vfiomgr.diagnostic import refuse
from vfiomgr.documents.difference import unified
from vfiomgr.documents.text import bytes_of, is_sealed, sealed
from vfiomgr.errors import UsageError
from vfiomgr.host.rewrite import rewrite
from vfiomgr.kata.configurations import (
    ConfigurationOptions,
    is_drop_in,
    planned_configuration,
    tell_of_devices,
)
from vfiomgr.kata.model import DROP_IN, KataPlan
from vfiomgr.paths import HostPath
from vfiomgr.snapshot.completion import complete_address, complete_host_file
from vfiomgr.snapshot.session import Session, pass_session

_MACHINE = "/"


def output_path(session: Session, typed: str) -> str:
    """The file on this machine; with --root an absolute path is inside that root."""
    session.require_live(
        "cannot write --output to a snapshot", "omit --output, and redirect the output: > FILE"
    )
    root = os.path.realpath(session.root)
    if root == _MACHINE:
        return os.path.abspath(typed)
    whole = os.path.abspath(typed)
    if whole.startswith(f"{root}/"):
        return _located(session, whole[len(root) :])
    if not typed.startswith("/"):
        message = f"--output {typed} is not a file below --root {session.root}"
        raise UsageError(
            message, f"write an absolute path on that host; or redirect the output: > {typed}"
        )
    return _located(session, whole)


def _located(session: Session, path: str) -> str:
    """The real path of a file on the host, with its links resolved there."""
    tree = session.tree
    return tree.locate(tree.followed(HostPath(path)))


@click.command("config")
@click.argument("addresses", nargs=-1, shell_complete=complete_address)
@declared(ConfigurationOptions)
@click.option(
    "--output",
    metavar="FILE",
    shell_complete=complete_host_file,
    help="Write to this file atomically; with --root, below that root.",
)
@session_options(*READING, "dry_run", "verbose")
@pass_session
def config(
    session: Session,
    *,
    addresses: tuple[str, ...],
    output: str | None,
    **options: Unpack[ConfigurationOptions],
) -> None:
    """Print a Kata configuration for a guest with devices.

    Without ADDRESSES it is for all available devices: bound functions, and virtual functions with a
    vGPU of the vendor's driver. Functions of the same slot are included. Each function needs a root
    port, of which Kata has 16. By default a drop-in for config.d is printed. Only keys that the
    release supports are written.

    \b
    Examples:
      vfiomgr kata config
      vfiomgr kata config 0000:04:00.0 --kata-version 3.31 --kata-runtime rust
      vfiomgr kata config 04:00.0 --plug hot --hypervisor clh --kata-runtime go
      vfiomgr kata config 04:00.0 41:00.0 --memory 16G --firmware /opt/kata/share/ovmf/OVMF.fd
      vfiomgr kata config --annotations default_memory,kernel_params --no-pod-resources
      vfiomgr kata config --beside /etc/kata-containers/gpu/configuration.toml --dry-run \\
        --output /etc/kata-containers/gpu/config.d/50-vfiomgr.toml
      vfiomgr kata config 04:00.0 --kernel-params "pci=realloc" \\
        --whole /opt/kata/share/defaults/kata-containers/configuration-qemu.toml \\
        --output /etc/kata-containers/vfiomgr/kata-vfio/configuration.toml
    """
    target = None if output is None else output_path(session, output)
    is_whole = options["whole"] is not None
    made = planned_configuration(session, addresses, options, is_verbose=bool(session.verbose))
    text = made.text if target is None else _sealed(target, made.text, is_whole=is_whole)
    _deliver(session, made.plan, text, target or made.path, target)
    if not is_whole:
        _tell_of_place(session, made.path, target)
    tell_of_devices(session, made)


def _sealed(output: str, text: str, *, is_whole: bool) -> str:
    """The text with its hash; without a hash if it may contain edits of the old text."""
    before = _read(output)
    is_ours = not is_whole or not before or is_sealed(before)
    return sealed(text) if is_ours else text


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
        say(f"{path}: unchanged")
    elif session.dry_run:
        say_text(difference)
    else:
        say(f"wrote {path}")


def _tell_of_place(session: Session, path: str, output: str | None) -> None:
    """Note where a drop-in belongs, unless it was written there."""
    directory = os.path.dirname(path)
    if output is None and session.format == "table" and path.startswith("/"):
        note(f"write the drop-in to its place with: --output {path}")
    if output is None:
        return
    there = os.path.dirname(os.path.realpath(output))
    if not path.startswith("/"):
        if os.path.basename(there) != directory:
            note(f"Kata reads drop-ins only from {directory} beside its configuration")
    elif there != os.path.dirname(output_path(session, path)):
        note(f"Kata does not read {output} with this configuration; pass --output {path}")


def _refuse_over(before: str | None, text: str, path: str) -> None:
    """Refuse to replace files other than vfiomgr's own drop-in."""
    if not is_drop_in(text) or before is None or not before.strip():
        return
    if not is_drop_in(before):
        message = f"cannot replace {path}: it is not a drop-in of vfiomgr"
        hint = (
            f"pass --output …/config.d/{DROP_IN}; or --whole {path} to change it and keep its "
            "contents"
        )
        refuse("kata-foreign-file", path, message, hint)


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
        return bytes_of(path, "the configuration").decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        message = f"cannot replace {path}: {error.strerror}"
        raise UsageError(message, "name a regular file, or one that does not exist") from None


def _write(path: str, text: str) -> None:
    """Replace the file atomically; create its directory if needed."""
    rewrite(path, None, text.encode(), makes_parents=True)


def _difference(before: str, after: str, path: str) -> str:
    old, new = (text.splitlines(keepends=True) for text in (before, after))
    return "".join(unified(old, new, path, path))
