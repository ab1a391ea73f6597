"""Situations of the field corpus: one public report in one YAML file, and what an answer must say.

docs/field.md describes the format. Every key is checked, and an error names file and line.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, get_args

from msgspec import field

from vfiomgr import documents
from vfiomgr.documents.jsonable import Misfit, from_jsonable
from vfiomgr.errors import InvalidDocument
from vfiomgr.value import Value

CORPUS = Path(__file__).parent / "corpus"
_REMEDY = "see docs/field.md, The format"
Verdict = Literal["right", "half", "wrong", "silent"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
Category = Literal[
    "arm",
    "cdi",
    "desktop",
    "devices",
    "distributions",
    "kata",
    "kubernetes",
    "libvirt",
    "runtimes",
    "server",
    "vgpu",
]
Kind = Literal[
    "intel-desktop",
    "intel-server",
    "amd-desktop",
    "amd-server",
    "arm-server",
    "arm-board",
    "power",
    "virtual-machine",
]
_LINE = re.compile(
    r"(?:IOMMU Group (?P<group>\d+) )?(?P<address>[0-9a-f]{4,5}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) "
    r"(?P<kind>[^\[]+) \[(?P<code>[0-9a-f]{4}(?:[0-9a-f]{2})?)\]: (?P<name>.*) "
    r"\[(?P<vendor>[0-9a-f]{4}):(?P<device>[0-9a-f]{4})\](?: \(rev (?P<revision>[0-9a-f]{2})\))?"
    r"(?:\s+driver: (?P<driver>[\w-]+|\(none\)))?\s*(?:#.*)?"
)


class Listed(Value):
    """A function of the listing, as the scripts of forums print it."""

    address: str
    kind: str
    class_code: str
    name: str
    vendor: str
    device: str
    group: int | None = None
    revision: str = "00"
    driver: str | None = None


class Function(Value):
    """What the listing does not show of a function; every field has a default of its class."""

    below: str = ""
    """The address of its bridge; `root` for a function of the root bus."""
    boot_vga: bool = False
    numa: int | None = None
    reset: str | None = None
    """What reset_method has, e.g. `flr bus`."""
    bars: tuple[str, ...] = ()
    """Sizes of its memory BARs, e.g. 16M, 256M, 32M; from 256M on they are prefetchable."""
    subsystem: str = "1af4:1100"
    override: str | None = None
    mounted: str = ""
    """Where a partition of its disk is mounted."""
    default_route: bool = False
    total_vfs: int = 0
    physfn: str = ""
    """The physical function of a virtual one."""


class Process(Value):
    """A process of the host and the device nodes that it has open."""

    name: str
    open: tuple[str, ...] = ()


class Machine(Value):
    """The machine: what is not given is as a machine of this kind usually has it."""

    kind: Kind
    os: str = "debian 12"
    kernel: str = "6.8.0-45-generic"
    cmdline: str | None = None
    """The kernel command line; by default with what switches the IOMMU on."""
    iommu: bool = True
    """Whether the kernel uses an IOMMU."""
    firmware_iommu: bool = True
    """Whether the firmware describes one."""
    remaps_interrupts: bool = True
    cpu_bits: int = 46
    iommu_bits: int = 48
    vfio: Literal["available", "loaded", "built-in", "missing"] = "available"
    memory: int = 64
    """GiB, evenly on the nodes."""
    nodes: int = 1
    cpus: int = 16
    programs: tuple[str, ...] = ()
    """Further programs that are installed, by name."""
    drivers: tuple[str, ...] = ()
    """Further PCI drivers that are loaded; those of the listing are."""


class Expected(Value):
    """A fact or a remedy of the expert's answer, and by what one recognizes it in ours.

    One statement (a finding, a refusal, a paragraph) must have a rule of `rule` or words of `says`
    (regular expressions), and words of `remedy`, and `address`. `status` is the exit status of the
    command that begins with `of`.
    """

    fact: str
    rule: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    remedy: tuple[str, ...] = ()
    address: str = ""
    of: str = ""
    status: int | None = None


class Expert(Value):
    """What the expert's answer names, and what it does not say."""

    must: tuple[Expected, ...]
    must_not: tuple[Expected, ...] = ()


class Situation(Value):
    """One situation."""

    source: str
    date: str
    title: str
    category: Category
    kind: str
    host: str
    asked: str
    resolution: str
    decides: str
    machine: Machine
    commands: tuple[str, ...]
    answer: Expert
    batch: int
    verdict: Verdict | None = None
    """The verdict on the present answers; absent until they were judged."""
    first: Verdict | None = None
    """The verdict on the first answers, before anything was mended."""
    listing: str = ""
    functions: dict[str, Function] = field(default_factory=dict)
    files: dict[str, str | None] = field(default_factory=dict)
    """Files over the defaults; null removes one, `-> TARGET` is a link."""
    modes: dict[str, int] = field(default_factory=dict)
    """Modes of files, e.g. 0o600; usual is 0644, or 0755 for programs."""
    programs: dict[str, str] = field(default_factory=dict)
    """Outputs by command line."""
    processes: tuple[Process, ...] = ()
    input: dict[str, str] = field(default_factory=dict)
    """Files in the working directory of the commands."""
    note: str = ""
    """What the verdict is about, if that is not obvious."""

    def listed(self) -> tuple[Listed, ...]:
        """The functions of the listing, in order.

        Raises:
            ValueError: a line is not one of a listing.

        """
        lines = (line.strip() for line in self.listing.splitlines())
        return tuple(map(_read_line, filter(None, lines)))


def _read_line(line: str) -> Listed:
    match = _LINE.fullmatch(line)
    if match is None:
        message = f"not a line of a listing: {line!r}"
        raise ValueError(message)
    driver = match["driver"]
    return Listed(
        address=match["address"],
        kind=match["kind"],
        class_code=match["code"],
        name=match["name"].strip(),
        vendor=match["vendor"],
        device=match["device"],
        group=int(match["group"]) if match["group"] else None,
        revision=match["revision"] or "00",
        driver=None if driver in (None, "(none)") else driver,
    )


def read_situation(path: Path) -> Situation:
    """Read a file of the corpus.

    Raises:
        InvalidDocument: with file, line and the wrong key.

    """
    text, source = path.read_text(), str(path)
    data = documents.read_values(text, source, _REMEDY)
    try:
        situation = from_jsonable(Situation, data)
        _check(situation, path)
    except Misfit as error:
        message = f"{source}:{documents.misfit_in(error, text)}"
        raise InvalidDocument(message, _REMEDY) from None
    return situation


def _check(situation: Situation, path: Path) -> None:
    """Check what types do not say.

    Raises:
        Misfit: with the place.

    """
    _require(situation.category == path.parent.name, "not the directory of the file", "category")
    try:
        known = {each.address for each in situation.listed()}
    except ValueError as error:
        raise Misfit(str(error), ("listing",)) from None
    for address in situation.functions:
        _require(address in known, "not in the listing", "functions", address)
    for name in situation.files:
        _require(name.startswith("/"), "not an absolute path", "files", name)
    _require(bool(situation.answer.must), "needs a fact", "answer", "must")
    for part in ("must", "must_not"):
        for index, each in enumerate(getattr(situation.answer, part)):
            _check_expected(each, situation, ("answer", part, index))


def _check_expected(each: Expected, situation: Situation, place: tuple[str | int, ...]) -> None:
    is_found = bool(each.rule or each.says or each.remedy or each.status is not None)
    _require(is_found, "needs rule, says, remedy or status", *place)
    is_asked = any(command.startswith(each.of) for command in situation.commands)
    _require(is_asked, "no command begins with it", *place, "of")
    for name in ("says", "remedy"):
        for index, pattern in enumerate(getattr(each, name)):
            try:
                re.compile(pattern)
            except re.error as error:
                message = f"not a regular expression: {error}"
                raise Misfit(message, (*place, name, index)) from None


def _require(condition: bool, what: str, *place: str | int) -> None:  # noqa: FBT001 - as assert
    if not condition:
        raise Misfit(what, place)


def corpus() -> list[Path]:
    """All files of the corpus, sorted."""
    return sorted(CORPUS.glob("*/*.yaml"))
