"""The steps in order: the most valuable and least disruptive come first."""

from __future__ import annotations

from tests.bench.first_contact import drills, facts, measuring, nvml_answers, smoke
from tests.bench.first_contact.runner import Step

# Seconds: the deadline, and the time reserved for the step whatever came before it. All reserved times fit into nine
# minutes; the steps that follow get what a step leaves of its deadline.
STEPS = (
    Step("facts", "the machine, its driver, kernel and topology", facts.step, 45, 10),
    Step("readings", "what the smoke test reads of NVML", facts.look, 30, 5),
    Step("nvml", "every answer of NVML", nvml_answers.step, 60, 20),
    Step("cuda", "what CUDA says of the GPUs", measuring.devices, 40, 10),
    Step("smoke-quick", "gpu-smoke boot-quick, enforcing", smoke.step("boot-quick", "enforce"), 100, 30),
    Step("coverage", "the SMs that blocks are seen on", measuring.coverage, 30, 8),
    Step("copies", "H2D and D2H alone, side by side, from each NUMA node", measuring.copies, 75, 25),
    Step("spread", "ten runs of each measurement", measuring.spread, 130, 70),
    Step("jit", "the driver's compiler, cold and warm", measuring.compiling, 30, 10),
    Step("references", "device copy, pinned copies, cuBLAS", measuring.references, 45, 15),
    Step("drill-result", "a wrong bit in what a kernel is given", drills.step("result"), 40, 12),
    Step("drill-memory", "a wrong bit in memory", drills.step("memory"), 40, 12),
    Step("drill-copy", "a wrong bit in copies", drills.step("copy"), 40, 12),
    Step("drill-crash", "a worker that crashes", drills.step("crash"), 20, 6),
    Step("drill-killed", "a worker that is killed", drills.step("killed"), 25, 8),
    Step("drill-hang", "a kernel that doesn't end", drills.step("hang"), 35, 14),
    Step("drill-full", "memory nearly full", drills.nearly_full, 40, 15),
    Step("drill-in-use", "a process that holds the GPU", drills.in_use, 40, 15),
    Step("smoke-observe", "gpu-smoke boot-quick, observing", smoke.step("boot-quick", "observe"), 100, 15),
    Step("smoke-full", "gpu-smoke boot-full, enforcing", smoke.step("boot-full", "enforce"), 340, 100),
    Step("drill-xid-13", "a store that isn't aligned", drills.provoked(13, "fault-alignment"), 25, 8),
    Step("drill-xid-31", "a store to no memory", drills.provoked(31, "fault-address"), 25, 8),
    Step("after", "NVML and the kernel's log after all of it", facts.look, 20, 5),
    Step("smoke-periodic", "gpu-smoke periodic", smoke.step("periodic", "enforce"), 340, 100, spare=True),
)
BY_NAME = {step.name: step for step in STEPS}
