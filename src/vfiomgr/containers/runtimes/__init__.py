"""Entries in the configuration of containerd, CRI-O, Docker, k3s and rke2.

`prepare` prepares a change: `location` finds the files, a module for each runtime decides what to
write, `text` writes and re-reads it, `verify` checks it with the runtime itself. `apply` replaces
the files in one step.
"""
