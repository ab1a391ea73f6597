"""PCI functions, IOMMU groups, drivers and NUMA nodes, as sysfs shows them."""
