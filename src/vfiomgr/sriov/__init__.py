"""Virtual functions: how many there are, and what each gets of its GPU.

Quotas of GPUs that share themselves out among plain virtual functions are set around a change of
their number, since the driver forgets them with the functions. `nvidia_apply` runs NVIDIA's
sriov-manage, which also sets the functions up.
"""
