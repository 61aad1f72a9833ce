"""What this machine does for the program: processes, namespaces, sandboxes, files, signals and the host itself."""
