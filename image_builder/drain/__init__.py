"""Drain: empty hosts of what runs on them, without losing a job.

A rollout, the gate's controller and a command all drain. What a pod is (``pods``), which pods belong together
(``gangs``) and what to do next (``ladder``) are pure; ``fence``, ``ask`` and ``evict`` send one request each, and
``run`` goes round until every host is empty or skipped. All that has to outlive a killed process is in an annotation of
the Node: who goes on, and who takes it back, reads it there.
"""
