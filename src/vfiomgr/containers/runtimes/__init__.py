"""Entries in the configuration of containerd, CRI-O, Docker, k3s and rke2.

`prepare` makes a change ready: `location` finds the files, a module for each runtime decides what
they are to say, `text` writes it and reads it again, `verify` shows it to the runtime itself.
`apply` carries it out as one exchange of files.
"""
