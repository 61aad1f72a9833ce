"""What runs in the Kubernetes cluster beside the nodes: the gate and the token broker."""
