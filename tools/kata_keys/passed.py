"""Which functions of an IOMMU group reach the guest: the filters in the source of both runtimes."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

from tools.kata_keys.found import UnreadableSourceError
from tools.kata_keys.repository import name_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tools.kata_keys.repository import Release, Repository

GO = "src/runtime/pkg/device/drivers/utils.go"
_RS = "src/runtime-rs/crates/hypervisor/src"
RS = f"{_RS}/device/driver/vfio_device/core.rs"
RS_COMMAND_LINE = f"{_RS}/qemu/cmdline_generator.rs"
_HEADER = """\
# Which functions of an IOMMU group Kata passes to the guest, by runtime and release (`before` is
# the first release without it). `masks`: every class whose bits contain the mask; `classes`: these
# alone. `cdev`: /dev/vfio/devices/vfioN stands for its entire group; without it for its function,
# which is not filtered. `one`: a second function gets the name of the first, which QEMU refuses.
# Generated from the release tags of kata-containers/kata-containers (decision 12).
"""
_CLASS = re.compile(r"\b0x0?([0-9a-f]{3,4})\b")
_GO_CALL = re.compile(r"checkIgnorePCIClass\(pciClass, deviceBDF(?:, (0x[0-9a-f]{4}))?\)\n")
_GO_CLASSES = re.compile(
    r"^var pciClassesIgnoredForPassthrough = map\[uint64\]struct\{\}\{\n(.*?)^\}",
    re.MULTILINE | re.DOTALL,
)
_RS_CLASSES = re.compile(r"^const IOMMU_IGNORE\w*: &\[u\d+\] = &\[([^\]]*)\];", re.MULTILINE)
_RS_USE = re.compile(r"devices\.retain\(\|d\| .{,100}filter_bridge_device\(", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Filter:
    """What a release does with the functions of a group."""

    masks: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    has_group_cdevs: bool = False
    is_limited_to_one: bool = False


def write_passed(repository: Repository, oldest: Release) -> str:
    """The text of src/vfiomgr/kata/passed.toml.

    Raises:
        UnreadableSourceError: a release has a filter of a form that is not known.

    """
    parts = [_HEADER]
    for runtime, read in (("go", _read_go), ("rs", _read_rs)):
        found: dict[Release, Filter | None] = {}
        for release in repository.releases(oldest):
            try:
                found[release] = read(repository, release)
            except UnreadableSourceError as error:
                message = f"{name_of(release)}: {error}"
                raise UnreadableSourceError(message) from None
        parts += _rows(runtime, found)
    return "".join(parts)


def _rows(runtime: str, found: Mapping[Release, Filter | None]) -> Iterator[str]:
    """A row for each run of releases with the same filter."""
    starts: list[Release] = []
    for release, own in found.items():
        if not starts or found[starts[-1]] != own:
            starts.append(release)
    for first, end in zip(starts, [*starts[1:], None], strict=True):
        own = found[first]
        if own is not None:
            yield "\n".join(["", *_row(runtime, first, end, own), ""])


def _row(runtime: str, first: Release, end: Release | None, own: Filter) -> Iterator[str]:
    yield f"[{runtime}-{_short(first)}]".replace(".", "-")
    yield f'runtime = "{runtime}"'
    yield f'since = "{_short(first)}"'
    if end is not None:
        yield f'before = "{_short(end)}"'
    for name, values in (("masks", own.masks), ("classes", own.classes)):
        if values:
            shown = ", ".join(f'"{value}"' for value in values)
            yield f"{name} = [{shown}]"
    if own.has_group_cdevs:
        yield 'cdev = "group"'
    if own.is_limited_to_one:
        yield "one = true"


def _short(release: Release) -> str:
    """`4.1` of 4.1.0, which is not before it."""
    return name_of(release).removesuffix(".0")


def _read_go(repository: Repository, release: Release) -> Filter:
    text = repository.file(release, GO)
    check, call = _body(text, "func checkIgnorePCIClass("), _GO_CALL.search(text)
    listed = _GO_CLASSES.search(text)
    if call is not None and call[1] and "pciClassID&bitmask == bitmask" in check:
        return Filter(masks=_classes(call[1]))
    if call and listed and "pciClassesIgnoredForPassthrough[pciClassID]; ok" in check:
        return Filter(classes=_classes(listed[1]))
    return _fail("checkIgnorePCIClass", GO)


def _read_rs(repository: Repository, release: Release) -> Filter | None:
    """Return None for releases without cold-plug: the other path never filters."""
    if not repository.files(release, RS, ".rs"):
        return None
    text = repository.file(release, RS)
    found = replace(_filter_of_rs(text), has_group_cdevs=_has_group_cdevs(text))
    added = _body(repository.file(release, RS_COMMAND_LINE), "pub fn add_pcie_vfio_device(")
    if "self.devices.push(Box::new(root_port))" not in added:
        _fail("add_pcie_vfio_device", RS_COMMAND_LINE)
    # Each function of a group adds the port of the group, with its name.
    return replace(found, is_limited_to_one=True)


def _has_group_cdevs(text: str) -> bool:
    body = _body(text, "pub fn discover_vfio_device(")
    is_group = "discover_vfio_device_for_iommu_group(" in body
    if is_group == ("iommu_group: None" in body):
        _fail("discover_vfio_device", RS)
    return is_group


def _filter_of_rs(text: str) -> Filter:
    check, listed = _body(text, "fn filter_bridge_device("), _RS_CLASSES.search(text)
    if ".parse::<u32>()" in check:  # of `0x030200`: fails, and nothing is filtered
        return Filter()
    if listed is not None and "parse_class_code_u32(" in check and _RS_USE.search(text):
        if "class_code & bitmask == bitmask" in check:
            return Filter(masks=_classes(listed[1]))
        if "ignored.contains(&class_u16)" in check:
            return Filter(classes=_classes(listed[1]))
    return _fail("filter_bridge_device", RS)


def _fail(function: str, path: str) -> NoReturn:
    message = f"{function} in {path} has a form that is not known"
    raise UnreadableSourceError(message)


def _classes(text: str) -> tuple[str, ...]:
    """`0403` of 0x403."""
    return tuple(one.zfill(4) for one in _CLASS.findall(text))


def _body(text: str, start: str) -> str:
    """The text of a function, to the brace below its start; empty if there is none."""
    before, _, rest = text.partition(start)
    indent = len(before.rpartition("\n")[2])
    return rest.partition(f"\n{' ':{indent}}}}\n")[0] if indent else rest.partition("\n}\n")[0]
