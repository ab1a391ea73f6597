"""Why a pod gets its devices, or does not: each link from the pod to the guest."""
