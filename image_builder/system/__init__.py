"""What the program needs from this machine: processes, namespaces, sandboxes, files, signals and the host itself."""
