"""`check domain` reads what its rules ask: other virtual functions are only counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests import api
from tests.fakes.servers import VGPUS, dgx, vgpu_server
from tests.unit.libvirt.domains import EMPTY, hostdev
from vfiomgr.libvirt.checks import check_domains
from vfiomgr.libvirt.preflight.plan import preflight

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel

_VGPUS = tuple(uuid for _, uuid in VGPUS.values())


@pytest.mark.parametrize(("make", "vgpus"), [(vgpu_server, _VGPUS), (dgx, ())])
def test_a_domain_has_the_findings_of_a_complete_scan(
    tmp_path: Path, make: Callable[[Path], FakeKernel], vgpus: tuple[str, ...]
) -> None:
    kernel = make(tmp_path)
    host = api.host_at(kernel)
    complete = host.scan(with_users=True, with_readiness=True, with_guests=True, with_health=True)
    names = (*(str(device.address) for device in complete.devices), *vgpus)
    for name in names:
        domain = replace(EMPTY, hostdevs=(hostdev(name, managed=True),))
        (report,) = check_domains(host, [domain], None)
        assert (report,) == preflight(complete, [domain], None, {}), name


def test_virtual_functions_of_other_devices_are_not_read(tmp_path: Path) -> None:
    kernel = vgpu_server(tmp_path)
    host = api.host_at(kernel)
    read: list[str] = []
    original = kernel.read_bytes_in

    def noted(above: str, name: str, limit: int = 4096) -> bytes | None:
        read.append(f"{above}/{name}")
        return original(above, name, limit)

    kernel.read_bytes_in = noted  # type: ignore[method-assign]
    domain = replace(EMPTY, hostdevs=(hostdev("0000:08:00.5", managed=True),))
    check_domains(host, [domain], None)
    of = {path.split("/")[-2] for path in read if path.endswith("/reset_method")}
    assert {"0000:08:00.5", "0000:08:00.0", "0000:04:00.1"} <= of
    assert not any(name.startswith("0000:04:10.") for name in of)
    assert sum(name.startswith("0000:04:") for name in of) == 2
