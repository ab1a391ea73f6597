"""No message contains a value of Python, and numbers agree with their nouns."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.fakes import hosts
from tests.fakes.vgpu_hosts import a40_host, gim_host, mig_host, xe_host
from tests.unit.conftest import GOLDEN
from tests.unit.devices import with_facts
from vfiomgr.check import check
from vfiomgr.diagnostic import diagnostics_of
from vfiomgr.engine.registry import plan
from vfiomgr.errors import VfiomgrError, WriteFailed
from vfiomgr.passthrough.steps import Bind
from vfiomgr.paths import HostPath
from vfiomgr.sriov.steps import SetVirtualFunctions
from vfiomgr.vgpu.functions import creation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from vfiomgr.snapshot.model import HostSnapshot

_VALUES = re.compile(r"\b(?:None|True|False)\b|<[A-Z]\w+\.\w+: |(?<!\w)\(\)|[=:] ?\[\]|\{\}")
_NOUNS = (
    "blocker|warning|info|device|function|group|vGPU|GPU|pod|node|error|part|file|domain|reason"
    "|vector|instance|port|step|byte"
)
_KINDS = "(?:PCI |virtual |physical |IOMMU |MSI-X |GPU )?"
_NUMBERS = re.compile(
    rf"(?<![\w.:,/-])(?<!-> )(?:1 {_KINDS}(?:{_NOUNS})s"
    rf"|(?:0|[2-9]|[1-9]\d+) {_KINDS}(?:{_NOUNS}))(?![\w-])"
)
_JSON = ("{", "[", "}", "]", '"')


def wrong(text: str) -> list[str]:
    """The lines with a value of Python, or with a number that does not agree."""
    return [line for line in text.splitlines() if _VALUES.search(line) or _NUMBERS.search(line)]


@pytest.mark.parametrize(
    "text",
    [
        "vfiomgr sriov set 0000:08:01.7 None",
        "1 PCI functions, e.g. 0000:01:00.0",
        "whether it is on: True",
        "2 device of this host",
        "devices: ()",
    ],
)
def test_such_a_message_is_found(text: str) -> None:
    assert wrong(text) == [text]


def test_messages_about_one_and_several_are_not_taken_for_wrong() -> None:
    assert wrong("1 blocker, 0 warnings, 12 devices; 0000:01:00.1 has 1 GPU instance") == []


def test_no_golden_output_has_such_a_message() -> None:
    texts = (path for path in sorted(GOLDEN.glob("**/*.txt")) if "json" not in path.name)
    found = [
        f"{path.name}: {line}"
        for path in texts
        for line in wrong(path.read_text())
        if "oci-" not in path.name
        and not line.removeprefix("[stderr]").lstrip().startswith(_JSON)
        and not re.search(r"\w: (\[\]|\{\})$", line)
    ]
    assert found == []


HOSTS: tuple[Callable[[Path], FakeKernel], ...] = (
    hosts.workstation,
    hosts.without_iommu,
    hosts.network_adapter,
    hosts.arm_server,
    hosts.dual_adapter,
    a40_host,
    mig_host,
    xe_host,
    gim_host,
)


def messages(host: HostSnapshot) -> Iterator[str]:
    """What a check says, and what plans for each function say, or refusals of them."""
    for found in check(host).findings:
        yield from (found.summary, found.why, found.remedy, *found.evidence)
    for device in host.devices:
        yield creation(host, device)
        for request in (Bind((device.address,)), SetVirtualFunctions(device.address, 1)):
            try:
                yield str(plan(host, request))
            except VfiomgrError as error:
                yield from (error.message, error.hint)
                for found in diagnostics_of(error):
                    yield from (found.summary, found.hint)


@pytest.mark.parametrize("is_alone", [False, True], ids=["all", "without-physical-functions"])
@pytest.mark.parametrize("make", HOSTS, ids=lambda make: make.__name__)
def test_no_rule_and_no_plan_has_such_a_message(
    tmp_path: Path, make: Callable[[Path], FakeKernel], *, is_alone: bool
) -> None:
    kernel = make(tmp_path)
    for device in api.scan(kernel).devices:
        settable = f"/sys/bus/pci/devices/{device.address}/sriov_numvfs"
        if device.sriov_numvfs == 0 and kernel.exists(HostPath(settable)):
            with suppress(WriteFailed):  # a GPU in MIG mode
                kernel.write(HostPath(settable), "2")
    host = api.scan(kernel, with_readiness=True)
    if is_alone:  # as in a recording that lacks them
        kept = tuple(device for device in host.devices if not device.sriov_totalvfs)
        host = with_facts(host, devices=kept)
    assert [line for text in messages(host) for line in wrong(text)] == []
