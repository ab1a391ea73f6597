"""Entries for k3s and rke2, in their template for containerd's configuration.

They use config-v3.toml.tmpl if it exists, else config.toml.tmpl, else their own; each is a Go
template around a configuration of version 3 or 2 (k3s, pkg/agent/containerd/config.go). So a new
config-v3.toml.tmpl would disable an existing config.toml.tmpl.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from vfiomgr.containers.runtimes import text, values
from vfiomgr.containers.runtimes.containerd import CRI_V2, CRI_V3, foreign, kata_table, oci_table
from vfiomgr.containers.runtimes.edit import Decision, Edit
from vfiomgr.containers.runtimes.model import Setting, shown
from vfiomgr.diagnostic import blocker, refusal, refuse
from vfiomgr.version import Version

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.containers.runtimes.model import OwnedFile, RuntimeFacts, RuntimeRequest

BASE = '{{ template "base" . }}\n'
"""Includes everything that k3s would write without a template (since autumn 2023)."""
V3_NAME = "config-v3.toml.tmpl"
_END = "# vfiomgr: end\n"
_HAS_CDI_ON = Version(2, 0)


def decide(facts: RuntimeFacts, request: RuntimeRequest) -> Decision:
    """Decide how to add an entry to a template; `facts.main` is its last result.

    Raises:
        Refusal: an entry of another program has the name, or it cannot be set here.

    """
    if request.set_default:
        message = f"{request.program} sets its default runtime itself"
        refuse(
            "runtime-default-elsewhere",
            request.program,
            message,
            f"start {request.program} with --default-runtime {request.name}",
        )
    template, rendered = facts.drop_in, facts.main
    plugin = CRI_V3 if template.path.endswith(V3_NAME) else CRI_V2
    runtimes = ("plugins", plugin, "containerd", "runtimes")
    there = {} if rendered.text is None else text.parse(rendered.text, rendered.path)
    is_made = values.found(there, (*runtimes, request.name)) is not values.ABSENT
    if names(template.text or "", request.name):
        raise foreign(request, f"{request.program}, in {template.path}")
    if is_made and not facts.was_ours:
        raise foreign(request, f"{request.program}, in {rendered.path}")
    table = (
        kata_table(request) if request.is_kata else oci_table(request, _options(there, runtimes))
    )
    settings = [Setting((*runtimes, request.name), table)]
    block = f"{_begin(request.name)}{text.with_settings('', settings, '/template.toml')}{_END}"
    return Decision(
        (Edit(template, (), BASE, block),),
        tuple(_notes(facts, request, there, plugin)),
        expected=tuple(settings),
        ours=((*runtimes, request.name),),
    )


def _notes(
    facts: RuntimeFacts, request: RuntimeRequest, there: values.Data, plugin: str
) -> Iterator[str]:
    """Notes about CDI, whose key is in a table outside the template.

    Raises:
        Refusal: CDI was requested, but is disabled.

    """
    told = values.found(there, ("plugins", plugin, "enable_cdi"))
    is_new = plugin == CRI_V3 or (facts.version is not None and facts.version >= _HAS_CDI_ON)
    is_on = told is True or (told is values.ABSENT and is_new)
    if not request.enable_cdi or is_on:
        return
    message = f"cannot enable CDI in {request.program} with an entry in a template"
    if not request.is_kata:
        hint = f"omit --cdi, or use a {request.program} with containerd 2, which enables CDI"
        refuse("runtime-without-cdi", request.program, message, hint)
    yield f"{message}: devices in annotations need containerd 2"


def _options(there: values.Data, runtimes: tuple[str, ...]) -> dict[str, Any]:
    """The options of runc, such as SystemdCgroup, in the last result."""
    found = values.found(there, (*runtimes, "runc", "options"))
    options = found if isinstance(found, dict) else {}
    return {name: value for name, value in options.items() if name != "BinaryName"}


def _begin(name: str) -> str:
    return f"# vfiomgr: {name}\n"


def block_of(template: str, name: str) -> str:
    """The added block of an entry; empty if there is none."""
    return template.partition(_begin(name))[2].partition(_END)[0]


def names(template: str, name: str) -> bool:
    """Whether a template has a table for a runtime of this name."""
    quoted = "|".join(re.escape(form) for form in (shown((name,)), f'"{name}"', f"'{name}'"))
    return (
        re.search(rf"^\s*\[[^]#\n]*\.runtimes\.({quoted})\s*\]", template, re.MULTILINE) is not None
    )


def without_block(current: str, file: OwnedFile, name: str, command: str) -> str | None:
    """A template without the added block; None if nothing is left.

    Raises:
        Refusal: the block was changed since.

    """
    if current == file.after:
        return file.before
    left = text.reverted(current, BASE if file.before is None else file.before, file.after)
    if left is not None:
        return None if file.before is None and left.strip() == BASE.strip() else left
    if _begin(name) not in current and not names(current, name):
        return current
    message = f"entry {name} in {file.path} was changed since vfiomgr wrote it"
    hint = (
        f"remove it manually, including its lines `{_begin(name).strip()}`; then run {command} "
        "again"
    )
    raise refusal([blocker("runtime-entry-changed", file.path, message, hint)])
