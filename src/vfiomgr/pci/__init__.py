"""PCI functions, IOMMU groups, drivers and memory, as sysfs shows them.

`function` reads the directory of one function, `facts` reads all functions of a host.
"""
