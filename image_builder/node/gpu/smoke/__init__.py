"""The smoke test: one process that observes and judges, and a process per GPU that makes it compute.

command                     ``node-agent gpu-smoke``
fleet, program              the workers' processes, and the program that they run
worker                      ``node-agent gpu-worker``: all measurements of one GPU
cuda                        the CUDA driver's library; ``kernels`` has the PTX
reference, tensor           the right answers, computed on the host          (pure)
known_answer, memory        kernels whose answers are known, and memory that must keep what was written to it
bandwidth                   how fast memory is copied, with GPUs taking turns
"""
