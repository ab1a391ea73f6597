"""Virtual functions: their number, and their quotas of a GPU.

Quotas of plain virtual functions are set together with their number, because the driver drops them
with the functions. NVIDIA's sriov-manage, which `apply` runs too, also initializes the functions.
"""
