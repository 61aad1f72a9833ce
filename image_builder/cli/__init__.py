"""The command line: the only package that prints. A command's dependencies are imported when it runs."""
