"""Names of classes of PCI functions, by the digits that their codes begin with (pci.ids)."""

from __future__ import annotations

CLASS_NAMES = {
    "display": "03",
    "vga": "0300",
    "3d": "0302",
    "network": "02",
    "ethernet": "0200",
    "nvme": "0108",
    "storage": "01",
    "audio": "0403",
    "usb": "0c03",
    "accelerator": "12",
    "infiniband": "0207",
}
"""One class each."""
LAYOUT_CLASSES = {
    **{name: (digits,) for name, digits in CLASS_NAMES.items()},
    "gpu": ("03", "12"),
    "nic": ("02",),
}
"""The classes that layouts name."""
DEVICE_KINDS = {
    **LAYOUT_CLASSES,
    "audio": ("0401", "0403"),
    "sound": ("0401", "0403"),
    "bridge": ("06",),
    "serial": ("0700",),
    "crypto": ("10",),
}
"""What people call devices, which can be of several classes."""
