"""CDI specifications: what a host can offer, and what consumers make of files.

`document` reads a file with the line of every key and keeps what no value holds, since consumers
differ in what they make of it; `rules` knows what each library refuses, `check` judges all files
of a host, `generate` makes a specification of what is ready. `follow` and `apply` keep vfiomgr's
own files to devices that are there.
"""
