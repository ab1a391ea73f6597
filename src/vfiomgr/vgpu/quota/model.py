"""Quotas of virtual functions: how a GPU's driver divides memory and time among them.

xe: Documentation/ABI/testing/sysfs-driver-intel-xe-sriov; before Linux 6.19, and read-only here,
drivers/gpu/drm/xe/xe_gt_sriov_pf_debugfs.c. i915 with SR-IOV is Intel's out-of-tree driver:
drivers/gpu/drm/i915/gt/iov/intel_iov_sysfs.c (`iov`, or `prelim_iov` in its backports). All of them
number virtual functions from 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from vfiomgr.expressions import expression
from vfiomgr.paths import RUNTIME, HostPath
from vfiomgr.units import GIB, MIB
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciAddress

Interface = Literal["xe", "i915", "debugfs"]
"""`debugfs` is for xe before Linux 6.19, which is read but not written."""

Quantity = Literal["memory", "exec_quantum_ms", "preempt_timeout_us", "sched_priority"]
Priority = Literal["low", "normal", "high"]

QUANTITIES: dict[str, Quantity] = {
    "vram_quota": "memory",
    "lmem_quota": "memory",
    "exec_quantum_ms": "exec_quantum_ms",
    "preempt_timeout_us": "preempt_timeout_us",
    "sched_priority": "sched_priority",
}
"""The quantity that an attribute sets."""
SHARED = ("ggtt_quota", "contexts_quota", "doorbells_quota")
"""Other resources of i915; with a quota of one kind, i915 provides none of the others."""
PRIORITIES: tuple[Priority, ...] = ("low", "normal", "high")
AUTO = "pf/auto_provisioning"
"""Whether i915 divides all resources itself when it creates virtual functions."""
BULK_PRIORITY = ".bulk_profile/sched_priority"
"""One value for all functions: GuC cannot change it for one virtual function."""
PHYSICAL_PRIORITY = "pf/profile/sched_priority"
RECORDS = RUNTIME / "quotas"
_CHOSEN = expression(r"\[(\w+)\]")
_IN_BYTES = ("vram_quota", "lmem_quota", "ggtt_quota")
_LARGEST_UNIT = 64 << 20
"""Bytes by which a memory quota may exceed the request; drivers align it, currently to 2 MiB."""


class QuotaAttribute(Value):
    """One attribute, by its path below the quota directory of the GPU.

    `text` is None if it cannot be read because it differs between tiles (EUCLEAN).
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
        """Its value as a number."""
        return int(self.text) if self.text is not None and self.text.isdecimal() else None

    @property
    def value(self) -> str | None:
        """Its value; if there are several words, the one in brackets."""
        return chosen(self.text)


class FunctionQuotas(Value):
    """The quotas of one function; number 0 is the physical function."""

    number: int
    attributes: tuple[QuotaAttribute, ...]

    def of(self, quantity: Quantity) -> tuple[QuotaAttribute, ...]:
        """The attributes of one quantity: one, or one per tile."""
        return tuple(a for a in self.attributes if QUANTITIES.get(a.kind) == quantity)

    @property
    def shared(self) -> tuple[QuotaAttribute, ...]:
        """The other resources of i915."""
        return tuple(a for a in self.attributes if a.kind in SHARED)

    @property
    def memory(self) -> int | None:
        """Bytes on all tiles; None if unknown."""
        numbers = [attribute.number for attribute in self.of("memory")]
        known = [number for number in numbers if number is not None]
        return sum(known) if known and len(known) == len(numbers) else None

    @property
    def exec_quantum_ms(self) -> int | None:
        """Time slice in milliseconds; 0 for no limit, None if tiles differ."""
        return self._alike("exec_quantum_ms")

    @property
    def preempt_timeout_us(self) -> int | None:
        """Preemption timeout in microseconds; 0 for no limit, None if tiles differ."""
        return self._alike("preempt_timeout_us")

    @property
    def sched_priority(self) -> str | None:
        """The priority."""
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
        """The quantities that differ between tiles (EUCLEAN)."""
        found: list[str] = []
        for quantity in _ORDER[1:]:  # tiles have memory of their own
            attributes = self.of(quantity)
            is_unread = any(attribute.text is None for attribute in attributes)
            if is_unread or len({attribute.value for attribute in attributes}) > 1:
                found.append(quantity)
        return tuple(found)

    def __str__(self) -> str:
        """`4 GiB, 20 ms, 1000 us, low`, without unknown values."""
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
    """Bytes of the GPU; None if unknown."""
    supplies: tuple[QuotaAttribute, ...] = ()
    """i915: the remaining resources on each tile, e.g. `gt0/lmem_free`."""
    auto: str | None = None
    """i915: whether it divides resources itself, `1` or `0`."""
    originals: tuple[QuotaAttribute, ...] = ()
    """The original values of the attributes that vfiomgr changed."""

    def function(self, number: int) -> FunctionQuotas | None:
        """The quotas of the function with this number."""
        return next((found for found in self.functions if found.number == number), None)

    @property
    def virtual(self) -> tuple[FunctionQuotas, ...]:
        """The quotas of virtual functions, including functions that do not exist yet."""
        return tuple(found for found in self.functions if found.number)

    def has(self, quantity: Quantity, number: int = 1) -> bool:
        """Whether the driver supports this quota for a function."""
        found = self.function(number)
        return found is not None and bool(found.of(quantity))

    def can_set(self, quantity: Quantity, number: int = 1) -> bool:
        """Whether the quota can be set; the priority of virtual functions only for all together."""
        found = self.function(number)
        if quantity == "sched_priority" and number:
            return self.has(quantity, number)
        return found is not None and all(a.is_writable for a in found.of(quantity))

    def text(self, name: str) -> str | None:
        """The value of an attribute."""
        if name == AUTO:
            return self.auto
        for function in self.functions:
            for attribute in function.attributes:
                if attribute.name == name:
                    return attribute.value
        return None

    def original(self, name: str) -> str | None:
        """The value of an attribute before vfiomgr changed it; None if it did not."""
        return next((known.text for known in self.originals if known.name == name), None)

    @property
    def taken(self) -> int:
        """Bytes assigned to virtual functions."""
        return sum(function.memory or 0 for function in self.virtual)


class VfQuota(Value):
    """The requested quotas of virtual functions; the driver chooses values that are None."""

    memory: int | None = None
    """Bytes for each function."""
    exec_quantum_ms: int | None = None
    preempt_timeout_us: int | None = None
    sched_priority: Priority | None = None

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """The quantities that are set."""
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
    """The word in brackets of `[low] normal high`, or the entire text."""
    found = _CHOSEN.search(text or "")
    return found[1] if found else text


def is_of_memory(name: str) -> bool:
    """Whether an attribute is about memory, or a resource that i915 divides with it."""
    kind = name.rpartition("/")[2]
    return name == AUTO or kind in SHARED or QUANTITIES.get(kind) == "memory"


def is_met(name: str, wanted: str, text: str | None) -> bool:
    """Whether an attribute has the requested value; memory may be aligned upwards."""
    found = chosen(text)
    if found is None or not (found.isdecimal() and wanted.isdecimal()):
        return found == wanted
    if name.endswith(_IN_BYTES) and int(wanted):
        return int(wanted) <= int(found) < int(wanted) + _LARGEST_UNIT
    return int(found) == int(wanted)


def in_bytes(size: int) -> str:
    """`4 GiB`, `1536 MiB`."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if size and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} bytes" if size else "0"


def record_file(gpu: PciAddress | str) -> HostPath:
    """The file with the original quotas of a GPU; a reboot removes it, and the quotas too."""
    return RECORDS / str(gpu)


def record_text(originals: dict[str, str]) -> str | None:
    """The text of the record, one line per attribute; None if it is empty."""
    lines = [f"{name} {text}\n" for name, text in sorted(originals.items())]
    return "".join(lines) or None


def parse_record(text: str | None) -> tuple[QuotaAttribute, ...]:
    """Read what `record_text` wrote."""
    pairs = (line.partition(" ") for line in (text or "").splitlines())
    found: list[QuotaAttribute] = []
    for name, separator, value in pairs:
        is_below = not name.startswith("/") and "\0" not in name and ".." not in name.split("/")
        if separator and is_below:  # a relative path, as attributes have
            found.append(QuotaAttribute(name, value))
    return tuple(found)
