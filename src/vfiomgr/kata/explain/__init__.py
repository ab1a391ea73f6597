"""Check whether a pod gets its devices: each step from the pod to the guest."""
