"""A host at one moment, as one value that can be saved as JSON.

`values` has its fields, `model` what follows from them. `scan` reads the facts for lists, and
further facts for changes and checks: users of devices (`users`), and what the host uses them
for (`uses`, with `disks` and `routing`). It imports the facts of every capability, which no other
package may do.
"""
