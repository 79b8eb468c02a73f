"""What a run costs, computed from its configuration: no GPU, no process group, any number of ranks.

contents.py (which stage holds what) -> parameters.py, buffers.py (exact state of a rank)
                                     -> activations.py -> memory.py (peak of each pipeline rank)
                                     -> flops.py, communication.py, hardware.py -> step_time.py
search.py (the best layouts), report.py and picture.py (what is shown; ``tools/plan.py``)
"""
