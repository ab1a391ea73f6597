"""Who uses devices: processes, guests, pods, and the host itself.

`facet` is the facet `host.users`, and `uses` reads it: the processes that have device nodes open
(`processes`), what the host uses devices for (`uses`, with `disks` and `routing`), and the pods to
which the node's agent or the kubelet gave devices (`node_agent`). What could name a user and cannot
be read is reported (`UnknownUsers`).
"""
