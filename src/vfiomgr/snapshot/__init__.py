"""A host at one moment, as one value that goes to JSON and back.

`scan` reads what lists show, and `extra_facts` what a change or a check must know besides: users
of devices (`users`), and what of the running host rests on them (`uses`). It imports the facts of
every capability, which no other package may do.
"""
