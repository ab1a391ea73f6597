"""The PCI topology of a host as people draw it: NUMA nodes, root complexes, ports and functions.

`build` makes a tree of a snapshot, without asking the host; `model` folds what few people look for
and puts the rest into words; `render` writes it as text, SVG, HTML or DOT.
"""
