"""Check whether a pod gets its devices: each link from the pod to the guest."""
