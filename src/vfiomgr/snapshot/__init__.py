"""A host at one moment, as one value that can be saved as JSON.

`values` has its fields, of which facets are values of the packages that own them; `model` has what
follows from several of them. `scan` reads the facts for lists, and further facts for changes and
checks. `scan` imports the readers of every capability, which no other package may do.
"""
