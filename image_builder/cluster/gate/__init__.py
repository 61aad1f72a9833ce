"""The gate: the controller that admits nodes whose preflight passed, and no others.

A node registers with a taint that it can't remove itself. The controller removes it when the node's condition says that
the present boot passed, and restores it if the node has been restarted since. Without the controller, nodes stay out.
"""
