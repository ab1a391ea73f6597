"""The uses of devices by the running host: file systems, swap, addresses, bridges.

Each use names the command that ends it. `disks` also asks the kernel, which knows claims that no
table shows; `routing` finds interfaces in other network namespaces.
"""
