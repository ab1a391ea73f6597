"""CDI specifications: what a host can offer, and how consumers read the files.

`document` reads a file with the line of every key and keeps what the values cannot hold, because
consumers read it differently; `rules` has the requirements of each library, `check` checks all
files of a host, `devices` creates a specification of the available devices. `requests` removes
missing devices from vfiomgr's own files.
"""
