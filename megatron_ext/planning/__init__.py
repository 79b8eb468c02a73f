"""The cost of a run, computed from its configuration without a GPU, for any number of ranks.

Its modules, in the order in which they import each other:

stages.py (ranks and stages of a run) -> state.py (exact bytes that a rank keeps between steps)
-> network.py (`TaskCost`, which a task defines, and its formulas)
-> memory.py (peak memory of each pipeline rank, and the check before any rank starts),
kernels.py (kernels of a step in classes), hardware.py (rates that GPUs reach) -> step_time.py (time
of a step, and the best layouts) -> budget.py (that time by class of kernels)
-> report.py (the output of ``--dry-run`` and ``tools/plan.py``)
"""
