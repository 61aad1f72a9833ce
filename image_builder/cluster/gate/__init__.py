"""The gate: the controller that admits nodes whose preflight passed, and no others.

A node registers with a taint that it can't take away itself. The controller takes it away when the node's condition
says that this very boot passed, and puts it back when the node was started again since. Without the controller nodes
stay out.
"""
