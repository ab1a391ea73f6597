from __future__ import annotations

import pytest

from tests.unit.devices import pci_device
from vfiomgr.sriov.steps import ALL, QuotaChange, SetQuotas
from vfiomgr.vgpu.quota.model import (
    FunctionQuotas,
    GpuQuotas,
    QuotaAttribute,
    VfQuota,
    in_bytes,
    is_met,
    parse_record,
    record_text,
)

GPU = pci_device("0000:21:00.0").identity
GIB = 1 << 30


def function(**texts: str | None) -> FunctionQuotas:
    attributes = (QuotaAttribute(f"vf1/profile/{name}", text) for name, text in texts.items())
    return FunctionQuotas(1, tuple(attributes))


def test_a_function_in_words_leaves_out_what_is_not_told() -> None:
    assert str(function()) == "no quota"
    assert str(function(vram_quota="0", exec_quantum_ms="0")) == "no memory, no time limit"
    full = function(
        vram_quota=str(4 * GIB),
        exec_quantum_ms="20",
        preempt_timeout_us="1000",
        sched_priority="low [normal]",
    )
    assert str(full) == "4 GiB, 20 ms, preempted within 1000 us, priority normal"
    assert str(function(exec_quantum_ms=None)) == "exec_quantum_ms differs between tiles"


def test_memory_is_of_all_tiles_and_time_what_all_have() -> None:
    both = FunctionQuotas(
        2,
        (
            QuotaAttribute("vf2/gt0/lmem_quota", str(GIB)),
            QuotaAttribute("vf2/gt1/lmem_quota", str(2 * GIB)),
            QuotaAttribute("vf2/gt0/exec_quantum_ms", "10"),
            QuotaAttribute("vf2/gt1/exec_quantum_ms", "20"),
        ),
    )
    assert both.memory == 3 * GIB
    assert both.exec_quantum_ms is None
    assert both.differing == ("exec_quantum_ms",)


@pytest.mark.parametrize(("text", "word"), [("0", "low"), ("2", "high"), ("7", None)])
def test_priorities_of_debugfs_are_numbers(text: str, word: str | None) -> None:
    assert function(sched_priority=text).sched_priority == word


@pytest.mark.parametrize(
    ("name", "wanted", "text", "met"),
    [
        ("vf1/profile/vram_quota", "100", str(2 << 20), True),
        ("vf1/profile/vram_quota", str(GIB), str(GIB - 1), False),
        ("vf1/profile/vram_quota", str(GIB), str(2 * GIB), False),
        ("vf1/profile/vram_quota", "0", str(2 << 20), False),
        ("vf1/profile/exec_quantum_ms", "20", "21", False),
        ("vf1/profile/exec_quantum_ms", "20", "20", True),
        ("vf1/profile/exec_quantum_ms", "0", None, False),
        ("pf/profile/sched_priority", "high", "low normal [high]", True),
        ("pf/profile/sched_priority", "low", "low normal [high]", False),
    ],
)
def test_only_memory_may_be_more_than_was_asked_for(
    name: str, wanted: str, text: str | None, *, met: bool
) -> None:
    assert is_met(name, wanted, text) is met


def test_a_record_is_read_as_it_was_written() -> None:
    originals = {"vf1/profile/vram_quota": "0", "pf/auto_provisioning": "1"}
    found = parse_record(record_text(originals))
    assert {attribute.name: attribute.text for attribute in found} == originals
    assert record_text({}) is None
    assert parse_record(None) == ()
    assert parse_record("torn") == ()


def test_a_gpu_knows_what_is_taken() -> None:
    gpu = GpuQuotas("g", "xe", "/d", (FunctionQuotas(0, ()), function(vram_quota=str(GIB))))
    assert gpu.taken == GIB
    assert gpu.has("memory")
    assert not gpu.has("memory", 0)
    assert gpu.text("vf1/profile/vram_quota") == str(GIB)
    assert gpu.text("vf9/profile/vram_quota") is None


def test_a_share_names_its_quantities() -> None:
    share = VfQuota(memory=1536 << 20, exec_quantum_ms=0)
    assert share.quantities == ("memory", "exec_quantum_ms")
    assert str(share) == "1536 MiB, 0 ms"
    assert in_bytes(4097) == "4097 bytes"


def test_a_step_describes_itself_and_knows_its_inverse() -> None:
    changes = (
        QuotaChange("vf1/profile/vram_quota", "0", str(GIB)),
        QuotaChange("vf1/profile/exec_quantum_ms", "5", "20"),
    )
    step = SetQuotas(GPU, "/d", 1, changes)
    assert step.describe() == "0000:21:00.0: VF 1: vram_quota 1 GiB, exec_quantum_ms 20"
    assert step.commands() == (
        f"echo {GIB} > /d/vf1/profile/vram_quota",
        "echo 20 > /d/vf1/profile/exec_quantum_ms",
    )
    inverse = step.inverse()
    assert inverse is not None
    assert [change.after for change in inverse.changes] == ["5", "0"]
    assert inverse.inverse() == step
    assert step.is_of_memory
    bulk = QuotaChange(".bulk_profile/sched_priority", "low", "low", "vf1/profile/sched_priority")
    check = SetQuotas(GPU, "/d", ALL, (bulk,))
    assert check.inverse() is None
    assert check.describe() == "0000:21:00.0: all functions: verify sched_priority low"
    assert check.commands() == ("cat /d/vf1/profile/sched_priority",)
