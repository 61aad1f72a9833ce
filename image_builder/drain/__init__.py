"""Draining: emptying hosts of what runs on them, without losing a job.

A rollout, the gate's controller and a command all drain hosts. The code that decides what a pod is (``pods``), which
pods belong together (``gangs``) and what to do next (``ladder``) is pure; ``fence``, ``ask`` and ``evict`` send the
requests, and ``run`` loops until every host is empty or skipped. All state that has to outlive a killed process is in
an annotation of the Node: whatever continues or undoes the drain reads it there.
"""
