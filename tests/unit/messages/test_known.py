"""The tables of known messages: each entry is recognized by what is printed, and alone."""

from __future__ import annotations

import pytest

from vfiomgr.check.plan import RULES
from vfiomgr.containers.cdi.check import CDI_RULES
from vfiomgr.containers.cdi.readers import READER_RULES
from vfiomgr.kata.explain.image import RULES as GUEST_RULES
from vfiomgr.messages.known import (
    KERNEL,
    NVIDIA,
    QEMU,
    KnownMessage,
    explanations,
    find_messages,
    first_address,
    first_group,
    known_messages,
)
from vfiomgr.rules.runner import all_texts

_ORDINARY = """\
DMAR: IOMMU enabled
DMAR: Host address width 39
DMAR: RMRR base: 0x0000004c000000 end: 0x000000507fffff
DMAR-IR: Enabled IRQ remapping in x2apic mode
DMAR: No ATSR found
AMD-Vi: Interrupt remapping enabled
AMD-Vi: AMD IOMMUv2 functionality not available on this system - This is not a bug.
pci 0000:00:1c.0: BAR 13: no space for [io  size 0x1000]
pci 0000:00:1c.0: BAR 15: failed to assign [mem size 0x00200000 64bit pref]
pci 0000:00:1c.0: bridge window [mem size 0x00200000 64bit pref]: can't assign; no space
pci 0000:01:00.0: ROM [mem 0xfff80000-0xffffffff pref]: failed to assign
pci 0000:01:00.0: VF BAR 0 [mem 0x383fff000000-0x383fffffffff 64bit pref]: contains BAR 0 for 64 VFs
pci 0000:00:00.2: can't derive routing for PCI INT A
pci 0000:01:00.0: vgaarb: setting as boot VGA device
pcieport 0000:00:01.0: AER: enabled with IRQ 122
pcieport 0000:00:01.0: DPC: enabled with IRQ 122
i915 0000:00:02.0: vgaarb: VGA decodes changed: olddecodes=io+mem,decodes=io+mem:owns=io+mem
VFIO - User Level meta-driver version: 0.3
vfio_pci: add [10de:1b81[ffffffff:ffffffff]] class 0x000000/00000000
vfio-pci 0000:01:00.0: enabling device (0000 -> 0003)
vfio-pci 0000:01:00.0: resetting
vfio-pci 0000:01:00.0: reset done
vfio-pci 0000:01:00.0: ready 1023ms after FLR
x86/split lock detection: #AC: crashing the kernel on kernel split_locks and warning on user-space
kvm_amd: Nested Virtualization enabled
Lockdown: systemd-logind: hibernation is restricted; see man kernel_lockdown.7
nvidia: loading out-of-tree module taints kernel.
nvidia: module verification failed: signature and/or required key missing - tainting kernel
NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.144.03  Mon Dec 30 17:44:08 UTC 2024
nvidia-modeset: Loading NVIDIA Kernel Mode Setting Driver for UNIX platforms  550.144.03
nvidia 0000:01:00.0: vgaarb: VGA decodes changed: olddecodes=none,decodes=none:owns=io+mem
[nvidia-vgpu-vfio] 38512783-4893-47f7-9179-b0594167e86b: vGPU migration disabled
amdgpu 0000:03:00.0: amdgpu: Fetched VBIOS from ROM BAR
amdgpu 0000:03:00.0: amdgpu: SMU driver if version not matched
snd_hda_intel 0000:01:00.1: Disabling MSI
snd_hda_intel 0000:01:00.1: Handle vga_switcheroo audio client
xhci_hcd 0000:0c:00.3: xHCI Host Controller
xe 0000:03:00.0: [drm] PF: Enabled 4 of 4 VFs
nvme nvme0: 16/0/0 default/read/poll queues
HugeTLB: registered 1.00 GiB page size, pre-allocated 32 pages
2026-01-02 10:11:12.131+0000: starting up libvirt version: 11.3.0, qemu version: 10.0.2
char device redirected to /dev/pts/1 (label charserial0)
2026-01-02T10:12:12.131415Z qemu-system-x86_64: terminating on signal 15 from pid 913 (libvirtd)
2026-01-02 10:12:12.331+0000: shutting down, reason=shutdown
"""
"""Lines of hosts and guests without a problem."""
_EXAMPLES = [(each, text) for each in known_messages() for text in each.examples]


@pytest.mark.parametrize(("known", "text"), _EXAMPLES, ids=lambda one: getattr(one, "name", ""))
def test_each_example_is_recognized_as_its_message_alone(known: KnownMessage, text: str) -> None:
    assert [each.name for each in explanations(text)] == [known.name]
    assert [each.name for each in find_messages(f"noise\n{text}\nnoise\n")] == [known.name]


def test_each_entry_has_examples_and_plain_sentences() -> None:
    names = [each.name for each in known_messages()]
    assert len(names) == len(set(names))
    assert not set(names) & {rule.name for rule in all_texts()}
    for each in known_messages():
        assert each.examples, each.name
        for text in (each.meaning, each.remedy):
            assert text.endswith("."), each.name
            assert not {"|", "\n"} & set(text), each.name


def test_causes_are_rules_of_a_check_of_a_host() -> None:
    checks = (RULES, CDI_RULES, READER_RULES, GUEST_RULES)
    rules = {name for check in checks for rule in check.rules for name in rule.names}
    assert {name for each in known_messages() for name in each.see} <= rules


def test_a_message_of_a_log_becomes_part_of_a_finding() -> None:
    for each in known_messages():
        if each.program in {KERNEL, NVIDIA, QEMU}:
            assert each.meaning.count(". ") == 0, f"{each.name}: more than one sentence"


def test_a_log_has_each_message_once_for_a_function_with_its_last_line() -> None:
    log = (
        "[    1.000001] vfio-pci 0000:01:00.0: not ready 1023ms after FLR; waiting\n"
        "[    2.000001] usb 1-1: new device\n"
        "[   70.000001] vfio-pci 0000:01:00.0: not ready 65535ms after FLR; giving up\n"
        "vfio-pci 0000:02:00.0: not ready 65535ms after FLR; giving up"
    )
    first, second = find_messages(log, (KERNEL,))
    assert (first.address, first.count, first.seconds, first.line) == ("0000:01:00.0", 2, 70, 3)
    assert first.text == "vfio-pci 0000:01:00.0: not ready 65535ms after FLR; giving up"
    assert (second.address, second.count, second.seconds) == ("0000:02:00.0", 1, None)
    assert find_messages(log, ("QEMU",)) == ()


def test_a_harmless_message_is_explained_and_causes_no_finding() -> None:
    log = "vfio-pci 0000:01:00.0: vfio_ecap_init: hiding ecap 0x19@0x900"
    assert [each.name for each in explanations(log)] == ["hidden-capability"]
    assert find_messages(log, (KERNEL,)) == ()


def test_an_ordinary_log_has_no_known_message() -> None:
    assert find_messages(_ORDINARY) == ()


def test_a_message_that_was_copied_with_line_breaks_is_recognized() -> None:
    text = "Device is INELIGIBLE for IOMMU\n   domain attach due to platform RMRR requirement."
    assert [each.name for each in explanations(text)] == ["rmrr"]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("device [03:00.0] fault", "0000:03:00.0"),
        ("vfio 0000:0A:00.1: error", "0000:0a:00.1"),
        ("10000:e1:00.0 vanished", "10000:e1:00.0"),
        ("at 12:30:45.1 nothing", ""),
        ("version 1.2.3.4", ""),
    ],
)
def test_the_first_address_of_a_message(text: str, address: str) -> None:
    assert first_address(text) == address


def test_the_group_of_a_message() -> None:
    assert first_group("vfio: error opening /dev/vfio/14: Permission denied") == 14
    assert first_group("group 7 is not viable") == 7
    assert first_group("groups of users") is None


@pytest.mark.parametrize("before", [0, 500, 680, 950, 990, 1000, 2000, 100_000])
def test_a_message_anywhere_in_a_long_line_is_found_once(before: int) -> None:
    line = "vfio-pci 0000:01:00.0: not ready 65535ms after FLR; giving up"
    late = f"[    7.000001] {'x' * before} {line} {'x' * 2000}\n{line}\n"
    (found,) = find_messages(late, (KERNEL,))
    assert (found.address, found.line, found.count) == ("0000:01:00.0", 2, 2)
    (found,) = find_messages(late.partition("\n")[0], (KERNEL,))
    assert (found.seconds, found.line, found.count) == (7, 1, 1)
    assert [each.name for each in explanations(late)] == ["reset-timeout"]
    assert find_messages(f"{'x' * 2000}\n", (KERNEL,)) == ()


def test_a_long_text_without_a_message_is_searched_in_parts() -> None:
    assert explanations("GPU a is bound to " * 100_000) == ()
    assert find_messages("GPU a is bound to " * 10_000) == ()


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("x: Refused to change power state from D0 to D3hot", []),
        ("x: Refused to change power state, currently in D3", ["power-state"]),
        ("Memory cgroup out of memory: Killed process 1 (qemu-kvm)", ["guest-killed-by-limit"]),
        ("Memory cgroup out of memory: Killed process 1 (java)", []),
        ("Out of memory: Killed process 1 (qemu-system-x86)", ["guest-killed"]),
    ],
)
def test_what_is_only_similar_is_not_taken_for_a_message(line: str, names: list[str]) -> None:
    assert [each.name for each in find_messages(line, (KERNEL,))] == names


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("memory cgroup out of memory: Killed process 1 (kvm)", ["guest-killed-by-limit"]),
        ("error code 43 of NVIDIA", ["windows-code-43"]),
        ("npm ERR! code 43", []),
        ("npm error code 43", []),
        ("Process exited with code 43", []),
        ("Xid 79", ["gpu-lost"]),
        ("xid: 31", ["xid-program"]),
        ("what does Xid error 119 mean", ["xid-gpu"]),
        ("XID 79 detected on physical_chid:0x1c, guest_chid:0x14", ["vgpu-xid"]),
        ("transaction xid 31a", []),
        ("could not insert 'kvm_intel'", ["kvm-refused"]),
        ("could not insert 'kvm_amd': Operation not supported", ["kvm-refused"]),
        ("could not insert 'kvm_intel': Key was rejected by service", ["module-refused"]),
        ("could not insert 'kvm_intel': Unknown symbol in module", []),
    ],
)
def test_numbers_of_xids_and_modules_of_kvm_are_recognized(text: str, names: list[str]) -> None:
    assert [each.name for each in explanations(text)] == names
