"""Dynamic Resource Allocation: the driver `vfiomgr.io` of a node (resource.k8s.io/v1).

The scheduler chooses devices by their attributes, and packs vGPUs by shared counters. Devices are
published as ResourceSlices; the claims of a pod are prepared before its containers start.
"""
