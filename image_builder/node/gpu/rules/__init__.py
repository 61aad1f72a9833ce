"""The checks: evidence in, checks out, nothing else is touched.

node     the node's size, driver, devices and kernel log
gpu      each GPU, at rest and after the load
active   each GPU under load: samples, and what it computed and copied
checks   the table of all checks, and who must have passed which
policy   which failures count, and which only warn
"""
