"""The program's interface to this machine: processes, namespaces, sandboxes, files, signals and the host itself."""
