"""Arguments of QEMU as text: for a command line, or as a file for -readconfig."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from vfiomgr.errors import UsageError

if TYPE_CHECKING:
    from vfiomgr.qemu.model import QemuArgument

_SECTIONS = {
    "machine": ("machine", "type"),
    "m": ("memory", ""),
    "smp": ("smp-opts", ""),
    "numa": ("numa", "type"),
    "object": ("object", "qom-type"),
    "device": ("device", "driver"),
    "fw_cfg": ("fw_cfg", ""),
    "global": ("global", ""),
}
"""The sections of a configuration file by option, and the name of the first word of a value."""
_LONGEST_LINE = 1023
_LISTS = frozenset({"host-nodes"})
"""Properties with several values, which files number."""


def command_line(arguments: Iterable[QemuArgument]) -> str:
    """One option per line with its value, quoted as shells and xargs read it."""
    return "".join(f"-{one.option} {shlex.quote(one.value)}\n" for one in arguments)


def without_section(arguments: Iterable[QemuArgument]) -> tuple[QemuArgument, ...]:
    """The arguments for which configuration files have no section: -cpu."""
    return tuple(one for one in arguments if one.option not in _SECTIONS)


def configuration_file(arguments: Iterable[QemuArgument]) -> str:
    """A file for -readconfig, without the arguments of `without_section`.

    Raises:
        UsageError: QEMU cannot read a value from a file.
    """
    sections = (_section(one) for one in arguments if one.option in _SECTIONS)
    return "\n".join(sections)


def _section(argument: QemuArgument) -> str:
    section, head = _SECTIONS[argument.option]
    known = dict(argument.properties)
    named = f' "{known["id"]}"' if "id" in known else ""
    lines = "".join(_line(name, value) for name, value in _pairs(argument, head))
    return f"[{section}{named}]\n{lines}"


def _line(name: str, value: str) -> str:
    """One property; QEMU reads lines of 1,023 bytes, without escapes (util/qemu-config.c)."""
    line = f'  {name} = "{value}"\n'
    if '"' in value or "\n" in value or len(os.fsencode(line)) > _LONGEST_LINE:
        message = f"cannot write {name}={value!r} for -readconfig: QEMU cannot read it from a file"
        raise UsageError(message, "omit --readconfig, or use a value without quotation marks")
    return line


def _pairs(argument: QemuArgument, head: str) -> Iterator[tuple[str, str]]:
    if argument.head:
        yield head, argument.head
    for name, value in argument.properties:
        if argument.option == "global":
            driver, _, property_name = name.partition(".")
            yield from (("driver", driver), ("property", property_name), ("value", value))
        elif name in _LISTS:
            yield f"{name}.0", value
        elif name != "id":
            yield name, value
