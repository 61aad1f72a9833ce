"""A stand-in for a node's GPUs: recorded answers, and the drivers' libraries, in Python and in C."""
