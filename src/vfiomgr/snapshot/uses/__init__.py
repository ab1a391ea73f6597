"""What of the running host rests on a device: file systems, swap, addresses, bridges.

Each use names the command that ends it. `disks` also asks the kernel, which knows of claims that
no table shows; `far_links` finds interfaces in other network namespaces.
"""
