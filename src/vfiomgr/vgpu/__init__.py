"""vGPUs of every family: mediated devices, virtual functions of a vendor driver, quotas.

`capacity` says what each GPU has room for, and why not; `placement` finds the types that serve a
request and where they go; only then `plan` makes steps. With MIG they live in GPU instances
(`gpu_instances`, `mig/`).
"""
