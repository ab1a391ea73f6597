"""A GPU as a whole: its modes, its MIG instances, and who has it.

`mode` and `partitioning` change how a GPU divides itself, `switch` leads it from the host to one
guest or to vGPUs and back. They stand above `sriov`, since its virtual functions go and come with
them.
"""
