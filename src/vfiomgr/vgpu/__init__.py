"""vGPUs of every family: mediated devices, virtual functions of a vendor driver, quotas.

`capacity` finds how many vGPUs each GPU has room for; `placement` finds matching types and GPUs for
a request; `plan` makes the steps. With MIG, vGPUs run in GPU instances (`gpu_instances`, `mig/`).
"""
