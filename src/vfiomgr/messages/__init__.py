"""Known messages of the kernel, QEMU, libvirt, Kata and others: what causes them, and what helps.

The tables (`*.toml`) have a section for each program. `vfiomgr explain MESSAGE` looks up a text in
all of them; `vfiomgr check` looks up the kernel log in that of the kernel.
"""
