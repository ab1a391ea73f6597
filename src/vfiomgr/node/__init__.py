"""The agent of a Kubernetes node: it serves the devices of a prepared host to the kubelet.

`vfiomgr node run` offers functions on VFIO drivers and vGPUs as extended resources, by the device
plugin API v1beta1. It binds nothing, and serving requires no privilege.
"""
