"""A host at one moment, as one value that can be saved as JSON.

`values` has its fields, `model` what follows from them. `scan` reads the facts for lists, and
further facts for changes and checks: users of devices (`users`), and what the host uses them
for (`uses`, with `disks` and `routing`). `facets` reads what packages above own. `session` is the
host that the options of a command select, `filters` and `completion` are for its lists and words.
"""
