"""Preflights on the laboratory's other machines: what vfiomgr made ready, is found ready."""

from __future__ import annotations

import uuid as uuids
from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.lab import gpusim
from tests.lab.command import document, vfiomgr
from tests.lab.libvirt_mistakes import domain, mdev, pci
from vfiomgr.host.tree import HostTree
from vfiomgr.libvirt.preflight.plan import preflight
from vfiomgr.libvirt.xml.read import read_domain

if TYPE_CHECKING:
    from tests.lab.topology import Topology


def troubles(text: str) -> set[str]:
    """The blockers and warnings about a domain on this guest; pytest shows them where it fails.

    What the kernel logged during other tests does not count.
    """
    host = api.scan(HostTree("/"), with_users=True, with_readiness=True)
    (report,) = preflight(host, [read_domain(text.encode(), "guest.xml")])
    found = [f for f in report.findings if f.severity in ("blocker", "warning")]
    found = [f for f in found if f.rule != "kernel-log"]
    for finding in found:
        print(finding.rule, *finding.evidence, sep="\n  ")
    return {finding.rule for finding in found}


@pytest.mark.topology("mixed")
def test_gpus_on_two_roots(topology: Topology) -> None:
    names = ("gpu", "gpu_audio", "twin", "twin_audio")
    addresses = [topology.addresses[name] for name in names]
    near = "<numatune><memory mode='strict' nodeset='{}'/></numatune>"
    both = domain("".join(map(pci, addresses)), near.format("0-1"))
    assert troubles(both) == {"on-host-driver"}
    for pair in (addresses[:2], addresses[2:]):
        vfiomgr("bind", *pair)
    assert troubles(both) == set()
    far = domain("".join(map(pci, addresses[2:])), near.format(0))
    assert troubles(far) == {"far-memory"}
    assert troubles(domain("".join(map(pci, addresses[2:])), near.format(1))) == set()
    vfiomgr("unbind", *addresses)


@pytest.mark.topology("mixed")
def test_a_gpu_a_virtual_function_and_a_vgpu(topology: Topology) -> None:
    adapter, uuid = topology.addresses["nvme"], str(uuids.uuid4())
    gpu = [topology.addresses[name] for name in ("gpu", "gpu_audio")]
    vfiomgr("bind", *gpu)
    vfiomgr("sriov", "set", adapter, "1")
    (virtual,) = document("show", adapter)["virtual_functions"]
    text = domain("".join(map(pci, (*gpu, virtual))) + mdev(uuid))
    assert troubles(text) == {"on-host-driver", "vgpu-missing"}
    vfiomgr("bind", virtual)
    vfiomgr("vgpu", "create", "--parent", "mtty", "--type", "mtty-1", uuid)
    assert troubles(text) == set()
    assert troubles(domain(pci(adapter, managed="yes"))) == {"managed-in-use"}
    vfiomgr("vgpu", "remove", uuid)
    vfiomgr("sriov", "set", adapter, "0")
    assert troubles(text) == {"device-missing", "vgpu-missing"}
    vfiomgr("unbind", *gpu)


@pytest.mark.topology("sriov")
def test_a_virtual_function_of_a_vendors_driver() -> None:
    gpusim.load(family="vendor")
    try:
        gpusim.enable(2)
        host = api.scan(HostTree("/"))
        parents = [p for p in host.vgpus.parents if p.family == "vendor-vfio"]
        virtual = parents[0].name
        kind = next(t.id for p in parents for t in p.types)
        assert troubles(domain(pci(virtual))) == {"function-without-type"}
        vfiomgr("vgpu", "create", "--parent", virtual, "--type", kind)
        assert troubles(domain(pci(virtual))) == set()
        assert troubles(domain(pci(virtual, managed="yes"))) == {"managed-vendor-function"}
        vfiomgr("vgpu", "remove", virtual)
    finally:
        gpusim.unload()
