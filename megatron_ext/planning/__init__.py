"""The cost of a run, computed from its configuration: on no GPU, for any number of ranks.

stages.py (how a run is cut) -> state.py (exact bytes that a rank keeps between steps)
-> network.py (`TaskCost`, which a task hands in, and its formulas)
-> memory.py (peak of each pipeline rank, and what is refused before any rank starts),
hardware.py (what GPUs reach) -> step_time.py (and the best layouts)
-> report.py (what ``--dry-run`` and ``tools/plan.py`` show)
"""
