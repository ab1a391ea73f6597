"""Confidential guests in the schema of libvirt 12: the one of Debian sid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from lxml import etree

from tests.debian import unpacked
from tests.unit.guest_hosts import FAR, GPU, planned
from tests.unit.libvirt.test_confidential import AMD, INTEL, NEWEST
from vfiomgr.libvirt.xml import render

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def schemas() -> Path:
    """The schemas of the package libvirt0, which virt-xml-validate uses."""
    return unpacked("sid", "libvirt-clients") / "usr/share/libvirt/schemas"


@pytest.mark.parametrize("kind", ["tdx", "sev-snp"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"hugepage_bytes": 1 << 30}, {"has_tpm": True}, {"system": "windows"}],
    ids=["plain", "hugepages", "tpm", "windows"],
)
def test_the_schema_accepts_it(schemas: Path, kind: str, changes: dict[str, Any]) -> None:
    schema = etree.RelaxNG(file=str(schemas / "domain.rng"))
    seen = INTEL if kind == "tdx" else AMD
    plan = planned(GPU, FAR, host=seen, libvirt=NEWEST, launch_security=kind, **changes)
    document = etree.fromstring(render.domain(plan, with_reasons=True))
    assert schema.validate(document), schema.error_log
    wrong = render.domain(plan).replace("<launchSecurity type='", "<launchSecurity type='x")
    assert not schema.validate(etree.fromstring(wrong)), "the schema knows the kinds"
