"""Host drivers that stop a function before a reset, and set it up again afterwards.

The kernel calls `reset_prepare` and `reset_done` of a driver (pci_dev_save_and_disable and
pci_dev_restore in drivers/pci/pci.c) if its pci_error_handlers have them. A driver without them
continues to use a function that has lost its state. sysfs does not show the handlers. They were
read from the modules of Linux 6.1, 6.12 and 7.2; for fm10k, hns3, pds_core and 4xxx, from sources.
virtio-pci is left out: most virtio drivers do not support its handlers (virtio_pci_common.c).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.units import Version

if TYPE_CHECKING:
    from collections.abc import Mapping

_QAT = "drivers/crypto/intel/qat/qat_common/adf_aer.c"
HANDLERS: Mapping[Version, Mapping[str, str]] = {
    Version(6, 1): {
        "cxgb4": "drivers/net/ethernet/chelsio/cxgb4/cxgb4_main.c",
        "fm10k": "drivers/net/ethernet/intel/fm10k/fm10k_pci.c",
        "hns3": "drivers/net/ethernet/hisilicon/hns3/hns3_enet.c",
        "i40e": "drivers/net/ethernet/intel/i40e/i40e_main.c",
        "ice": "drivers/net/ethernet/intel/ice/ice_main.c",
        "mhi-pci-generic": "drivers/bus/mhi/host/pci_generic.c",
        "mwifiex_pcie": "drivers/net/wireless/marvell/mwifiex/pcie.c",
        "nvme": "drivers/nvme/host/pci.c",
        "qla2xxx": "drivers/scsi/qla2xxx/qla_os.c",
    },
    Version(6, 12): {
        "habanalabs": "drivers/accel/habanalabs/common/habanalabs_drv.c",
        "igbvf": "drivers/net/ethernet/intel/igbvf/netdev.c",
        "intel-ipu6": "drivers/media/pci/intel/ipu6/ipu6.c",
        "intel_vpu": "drivers/accel/ivpu/ivpu_drv.c",
        "ionic": "drivers/net/ethernet/pensando/ionic/ionic_bus_pci.c",
        "pds_core": "drivers/net/ethernet/amd/pds_core/main.c",
    },
    Version(7, 2): {
        "4xxx": _QAT,
        "c3xxx": _QAT,
        "c6xx": _QAT,
        "dh895xcc": _QAT,
        "idxd": "drivers/dma/idxd/init.c",
        "intel-ipu7": "drivers/staging/media/ipu7/ipu7.c",
    },
}
"""The file of the handlers by driver, under the oldest kernel for which they were verified."""


def handles_resets(driver: str, kernel: Version | None) -> bool:
    """Whether a host driver is known to have both handlers in this kernel."""
    return kernel is not None and any(
        since <= kernel and driver in drivers for since, drivers in HANDLERS.items()
    )
