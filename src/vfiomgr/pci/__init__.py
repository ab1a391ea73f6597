"""PCI functions, IOMMU groups and NUMA nodes, as sysfs shows them."""
