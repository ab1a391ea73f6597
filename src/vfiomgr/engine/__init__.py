"""How a change is made: planned, locked, recorded, carried out by workers, undone, recovered.

`transaction` leads a request to its end, `run` carries out a plan and `recovery` what was cut
off; `journal` and its siblings keep the record. The engine knows no kind of request or step:
`registry` finds what capabilities do with theirs.
"""
