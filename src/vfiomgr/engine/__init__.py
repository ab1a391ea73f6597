"""How a change is made: planned, locked, recorded, carried out by workers, undone, recovered.

`transaction` carries out a request, `run` a plan, and `recovery` handles what was interrupted;
`journal` and its siblings keep the record. The engine does not know the kinds of requests and
steps: `registry` finds the functions of the capabilities for them.
"""
