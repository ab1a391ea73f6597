"""Entries in the configuration of containerd, CRI-O, Docker, k3s and rke2.

`entries` prepares a change: `location` finds the files, `containerd` or `other_runtimes` decides
what to write, `text` writes and re-reads it. `apply` checks it with the runtime itself, and
replaces the files in one step.
"""
