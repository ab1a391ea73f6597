"""The table of what Kata passes to guests, made from small sources of the forms that are known."""

from __future__ import annotations

from importlib.resources import files

import pytest

from tests.unit.tools.test_kata_keys import OLDEST, Made, made
from tools.kata_keys import passed
from tools.kata_keys.found import UnreadableSourceError
from tools.kata_keys.passed import write_passed
from tools.kata_keys.repository import Repository

__all__ = ["made"]
GO_MASK = """\
func checkIgnorePCIClass(pciClass string, deviceBDF string, bitmask uint64) (bool, error) {
	if pciClassID&bitmask == bitmask {
		return true, nil
	}
}

	ignorePCIDevice, err := checkIgnorePCIClass(pciClass, deviceBDF, 0x0600)
"""
GO_LIST = """\
var pciClassesIgnoredForPassthrough = map[uint64]struct{}{
	0x0600: {},
	0x0604: {},
}

func checkIgnorePCIClass(pciClass string, deviceBDF string) (bool, error) {
	if _, ok := pciClassesIgnoredForPassthrough[pciClassID]; ok {
		return true, nil
	}
}

	ignorePCIDevice, err := checkIgnorePCIClass(pciClass, deviceBDF)
"""
RS_DECIMAL = """\
const IOMMU_IGNORE: &[u64] = &[0x0600, 0x403];
fn filter_bridge_device(bdf: &str, bitmasks: &[u64]) -> Option<u64> {
    match device_class.parse::<u32>() {
        if class_code & bitmask == bitmask {
    }
}
pub fn discover_vfio_device(vfio_device: &Path) -> Result<VfioDevice> {
    discover_vfio_device_for_iommu_group(gid, group_devnode)
}
"""
RS_MASK = RS_DECIMAL.replace("device_class.parse::<u32>()", "parse_class_code_u32(&class)") + (
    "    devices.retain(|d| match &d.addr {\n"
    "        filter_bridge_device(&bdf.to_string(), IOMMU_IGNORE).is_none()\n"
)
RS_LIST = """\
const IOMMU_IGNORE_CLASSES: &[u16] = &[0x0600, 0x0604, 0x0403];
fn filter_bridge_device(bdf: &str, ignored: &[u16]) -> Option<u16> {
    let class_code = parse_class_code_u32(&device_class)? >> 8;
    if ignored.contains(&class_u16) {
}
pub fn discover_vfio_device(vfio_device: &Path) -> Result<VfioDevice> {
    Ok(VfioDevice { iommu_group: None })
}
    devices.retain(|d| match &d.addr {
            filter_bridge_device(&bdf.to_string(), IOMMU_IGNORE_CLASSES).is_none()
"""
COMMAND_LINE = """\
impl X {
    pub fn add_pcie_vfio_device(&mut self, config: VfioDeviceConfig) -> Result<()> {
        self.devices.push(Box::new(root_port));
    }
}
"""


@pytest.fixture
def releases(made: Made) -> Made:
    """The releases whose filters differ, as Kata has them."""
    made.write(passed.GO, GO_MASK)
    made.tag("3.2.0", "3.30.0")
    made.write(passed.RS, RS_DECIMAL)
    made.write(passed.RS_COMMAND_LINE, COMMAND_LINE)
    made.tag("3.31.0", "3.32.0")
    made.write(passed.RS, RS_MASK)
    made.tag("4.0.0")
    made.write(passed.GO, GO_LIST)
    made.write(passed.RS, RS_LIST)
    made.tag("4.1.0")
    return made


def table(made: Made) -> str:
    return write_passed(Repository(str(made.directory)), OLDEST)


def test_the_table_of_vfiomgr_is_what_these_forms_make(releases: Made) -> None:
    own = (files("vfiomgr.kata") / "passed.toml").read_text(encoding="utf-8")
    assert table(releases) == own


@pytest.mark.parametrize(
    ("path", "old", "new", "function"),
    [
        (passed.GO, "[pciClassID]; ok", "[pciClassID>>8]; ok", "checkIgnorePCIClass"),
        (passed.GO, "err := checkIgnorePCIClass", "err := check", "checkIgnorePCIClass"),
        (passed.RS, "ignored.contains", "!allowed.contains", "filter_bridge_device"),
        (passed.RS, "devices.retain(", "devices.keep(", "filter_bridge_device"),
        (passed.RS, "iommu_group: None", "iommu_group: Some(1)", "discover_vfio_device"),
        (passed.RS_COMMAND_LINE, "(root_port)", "(port)", "add_pcie_vfio_device"),
    ],
)
def test_a_filter_of_another_form_is_an_error(
    releases: Made, path: str, old: str, new: str, function: str
) -> None:
    releases.change(path, old, new)
    releases.tag("4.2.0")
    with pytest.raises(UnreadableSourceError, match=rf"4\.2\.0: {function} in {path} has a form"):
        table(releases)


def test_a_new_class_is_a_new_row(releases: Made) -> None:
    releases.change(passed.RS, "0x0604, ", "0x0604, 0x0780, ")
    releases.tag("4.2.0")
    made = table(releases)
    assert 'since = "4.1"\nbefore = "4.2"\n' in made
    assert made.endswith('since = "4.2"\nclasses = ["0600", "0604", "0780", "0403"]\none = true\n')
