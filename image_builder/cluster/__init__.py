"""Services in the Kubernetes cluster: the gate and the token broker."""
