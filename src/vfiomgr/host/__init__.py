"""The only door to the files, nodes and programs of a host.

A `HostTree` reads and writes below one root: the running host, a recorded one, or the fake kernel
of the tests, and runs `programs` of the running one. Below another root `inside` follows links as
in a chroot; `rewrite` opens and replaces files that people name without following links of other
users, `owners` opens those that vfiomgr keeps.
"""
