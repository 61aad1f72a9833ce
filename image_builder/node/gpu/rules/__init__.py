"""The checks: evidence in, checks out, no side effects.

node     the node's size, driver, devices and kernel log
gpu      each GPU, at rest and after the load
active   each GPU under load: samples, and the results of computing and copying
checks   the table of all checks, and which tiers require them
policy   which failures count, and which only warn
"""
