"""The command line: the only package that prints. What a command needs is imported when it runs."""
