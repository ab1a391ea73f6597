"""Quotas of virtual functions: how a GPU's driver shares its memory and its time out among them.

xe: Documentation/ABI/testing/sysfs-driver-intel-xe-sriov; before Linux 6.19, and only to be read
here, drivers/gpu/drm/xe/xe_gt_sriov_pf_debugfs.c. i915 with SR-IOV is Intel's own, out of tree:
drivers/gpu/drm/i915/gt/iov/intel_iov_sysfs.c. All of them count virtual functions from 1.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from vfiomgr.paths import RUNTIME, HostPath
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.pci.model import PciAddress

Interface = Literal["xe", "i915", "debugfs"]
"""`debugfs` is that of an xe before Linux 6.19: it is shown, and not written."""

Quantity = Literal["memory", "exec_quantum_ms", "preempt_timeout_us", "sched_priority"]
Priority = Literal["low", "normal", "high"]

QUANTITIES: dict[str, Quantity] = {
    "vram_quota": "memory",
    "lmem_quota": "memory",
    "exec_quantum_ms": "exec_quantum_ms",
    "preempt_timeout_us": "preempt_timeout_us",
    "sched_priority": "sched_priority",
}
"""What an attribute of this name is about."""
SHARED = ("ggtt_quota", "contexts_quota", "doorbells_quota")
"""What else i915 shares out, or not: with a quota of one kind it provides none of the others."""
PRIORITIES: tuple[Priority, ...] = ("low", "normal", "high")
AUTO = "pf/auto_provisioning"
"""Whether i915 itself shares everything out when virtual functions are made."""
BULK_PRIORITY = ".bulk_profile/sched_priority"
"""Of all functions: GuC changes that of a single virtual one not."""
PHYSICAL_PRIORITY = "pf/profile/sched_priority"
RECORDS = RUNTIME / "quotas"
_CHOSEN = re.compile(r"\[(\w+)\]")
_IN_BYTES = ("vram_quota", "lmem_quota", "ggtt_quota")
_LARGEST_UNIT = 64 << 20
"""Bytes that a quota of memory may be more than was asked for: it is aligned, to 2 MiB as yet."""
_MIB = 1 << 20
_GIB = 1 << 30


class QuotaAttribute(Value):
    """One attribute, by its path below the directory of the GPU's quotas.

    `text` is None where it cannot be read: EUCLEAN, since it differs between tiles.
    """

    name: str
    text: str | None
    is_writable: bool = True

    @property
    def kind(self) -> str:
        """The last component of its path."""
        return self.name.rpartition("/")[2]

    @property
    def number(self) -> int | None:
        """What it reads, as a number."""
        return int(self.text) if self.text is not None and self.text.isdecimal() else None

    @property
    def value(self) -> str | None:
        """What it reads; of several words the one in brackets."""
        return chosen(self.text)


class FunctionQuotas(Value):
    """What one function gets; number 0 is the physical one."""

    number: int
    attributes: tuple[QuotaAttribute, ...]

    def of(self, quantity: Quantity) -> tuple[QuotaAttribute, ...]:
        """Its attributes of one quantity: one, or one for each tile."""
        return tuple(a for a in self.attributes if QUANTITIES.get(a.kind) == quantity)

    @property
    def shared(self) -> tuple[QuotaAttribute, ...]:
        """What else i915 shares out."""
        return tuple(a for a in self.attributes if a.kind in SHARED)

    @property
    def memory(self) -> int | None:
        """Bytes on all tiles; None where nothing tells."""
        numbers = [attribute.number for attribute in self.of("memory")]
        known = [number for number in numbers if number is not None]
        return sum(known) if known and len(known) == len(numbers) else None

    @property
    def exec_quantum_ms(self) -> int | None:
        """Milliseconds that it runs at a time; 0 without limit, None where tiles differ."""
        return self._alike("exec_quantum_ms")

    @property
    def preempt_timeout_us(self) -> int | None:
        """Microseconds that it has to stop in; 0 without limit, None where tiles differ."""
        return self._alike("preempt_timeout_us")

    @property
    def sched_priority(self) -> str | None:
        """The word for it."""
        values = {attribute.value for attribute in self.of("sched_priority")}
        value = values.pop() if len(values) == 1 else None
        if value is not None and value.isdecimal():  # as debugfs has it
            return PRIORITIES[int(value)] if int(value) < len(PRIORITIES) else None
        return value

    def _alike(self, quantity: Quantity) -> int | None:
        numbers = {attribute.number for attribute in self.of(quantity)}
        return numbers.pop() if len(numbers) == 1 else None

    @property
    def differing(self) -> tuple[str, ...]:
        """The attributes of quantities that are not the same on all tiles (EUCLEAN)."""
        kinds = ("exec_quantum_ms", "preempt_timeout_us", "sched_priority")
        single: tuple[Quantity, ...] = kinds  # type: ignore[assignment]
        return tuple(
            quantity
            for quantity in single
            if any(a.text is None for a in self.of(quantity))
            or len({a.value for a in self.of(quantity)}) > 1
        )

    def __str__(self) -> str:
        """`4 GiB, 20 ms, 1000 us, low`; what differs between tiles, or is not told, is left out."""
        return ", ".join(self._words()) or "no quota"

    def _words(self) -> Iterator[str]:
        if self.memory is not None:
            yield in_bytes(self.memory) if self.memory else "no memory"
        if self.exec_quantum_ms is not None:
            yield f"{self.exec_quantum_ms} ms" if self.exec_quantum_ms else "no time limit"
        if self.preempt_timeout_us:
            yield f"preempted within {self.preempt_timeout_us} us"
        if self.sched_priority is not None:
            yield f"priority {self.sched_priority}"
        for name in self.differing:
            yield f"{name} differs between tiles"


class GpuQuotas(Value):
    """The quotas of a GPU's functions, in the order of their numbers."""

    gpu: str
    interface: Interface
    directory: str
    functions: tuple[FunctionQuotas, ...]
    memory: int | None = None
    """Bytes of the whole GPU, where the host tells."""
    supplies: tuple[QuotaAttribute, ...] = ()
    """i915: what is left of each kind on each tile, e.g. `gt0/lmem_free`."""
    auto: str | None = None
    """i915: whether it shares out by itself, `1` or `0`."""
    originals: tuple[QuotaAttribute, ...] = ()
    """What the attributes that vfiomgr changed had been before."""

    def function(self, number: int) -> FunctionQuotas | None:
        """What the function of a number gets."""
        return next((found for found in self.functions if found.number == number), None)

    @property
    def virtual(self) -> tuple[FunctionQuotas, ...]:
        """Those of virtual functions, also of such as are not made yet."""
        return tuple(found for found in self.functions if found.number)

    def has(self, quantity: Quantity, number: int = 1) -> bool:
        """Whether the driver has such a quota for a function."""
        found = self.function(number)
        return found is not None and bool(found.of(quantity))

    def can_set(self, quantity: Quantity, number: int = 1) -> bool:
        """Whether it can be set as well; the priority of virtual functions for all of them."""
        found = self.function(number)
        if quantity == "sched_priority" and number:
            return self.has(quantity, number)
        return found is not None and all(a.is_writable for a in found.of(quantity))

    def text(self, name: str) -> str | None:
        """What an attribute reads."""
        if name == AUTO:
            return self.auto
        for function in self.functions:
            for attribute in function.attributes:
                if attribute.name == name:
                    return attribute.value
        return None

    def original(self, name: str) -> str | None:
        """What an attribute was before vfiomgr changed it; None where it did not."""
        return next((known.text for known in self.originals if known.name == name), None)

    @property
    def taken(self) -> int:
        """Bytes that virtual functions have."""
        return sum(function.memory or 0 for function in self.virtual)


class VfQuota(Value):
    """What virtual functions are to get; of what is None the driver gives what it wants."""

    memory: int | None = None
    """Bytes for each."""
    exec_quantum_ms: int | None = None
    preempt_timeout_us: int | None = None
    sched_priority: Priority | None = None

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """Those that are named."""
        return tuple(kind for kind in _ORDER if getattr(self, kind) is not None)

    def __str__(self) -> str:
        """`4 GiB, 20 ms`."""
        parts = [in_bytes(self.memory)] if self.memory is not None else []
        if self.exec_quantum_ms is not None:
            parts.append(f"{self.exec_quantum_ms} ms")
        if self.preempt_timeout_us is not None:
            parts.append(f"preempted within {self.preempt_timeout_us} us")
        if self.sched_priority is not None:
            parts.append(f"priority {self.sched_priority}")
        return ", ".join(parts)


_ORDER: tuple[Quantity, ...] = ("memory", "exec_quantum_ms", "preempt_timeout_us", "sched_priority")


def chosen(text: str | None) -> str | None:
    """Of `[low] normal high` the word in brackets; else the text itself."""
    found = _CHOSEN.search(text or "")
    return found[1] if found else text


def is_of_memory(name: str) -> bool:
    """Whether an attribute is about memory, or what i915 shares out with it."""
    kind = name.rpartition("/")[2]
    return name == AUTO or kind in SHARED or QUANTITIES.get(kind) == "memory"


def is_met(name: str, wanted: str, text: str | None) -> bool:
    """Whether an attribute reads what was asked for; memory may be aligned upwards."""
    found = chosen(text)
    if found is None or not (found.isdecimal() and wanted.isdecimal()):
        return found == wanted
    if name.endswith(_IN_BYTES) and int(wanted):
        return int(wanted) <= int(found) < int(wanted) + _LARGEST_UNIT
    return int(found) == int(wanted)


def in_bytes(size: int) -> str:
    """`4 GiB`, `1536 MiB`."""
    for unit, name in ((_GIB, "GiB"), (_MIB, "MiB")):
        if size and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} bytes" if size else "0"


def record_file(gpu: PciAddress | str) -> HostPath:
    """Where vfiomgr keeps what the quotas of a GPU were; a reboot removes it, as it does them."""
    return RECORDS / str(gpu)


def record_text(originals: dict[str, str]) -> str | None:
    """What the record says: a line for each attribute; None where there is nothing to say."""
    lines = [f"{name} {text}\n" for name, text in sorted(originals.items())]
    return "".join(lines) or None


def parse_record(text: str | None) -> tuple[QuotaAttribute, ...]:
    """Read what `record_text` wrote."""
    pairs = (line.partition(" ") for line in (text or "").splitlines())
    return tuple(
        QuotaAttribute(name, value) for name, found, value in pairs if found and _is_below(name)
    )


def _is_below(name: str) -> bool:
    """Whether a name is one below a directory, as those of attributes are."""
    return not name.startswith("/") and "\0" not in name and ".." not in name.split("/")
