"""GPUs: modes, MIG instances, and the switch between host, passthrough and vGPUs.

`plan` changes how a GPU is partitioned; `switch` moves it between the host, one guest and vGPUs.
They depend on `sriov`, because they also remove and create virtual functions.
"""
