"""Whether a host is ready to give devices to guests.

`facts` reads a `Readiness`, and the rules in `rules/` make findings of it and the snapshot, each
with its evidence. A rule says only what it can show.
"""
