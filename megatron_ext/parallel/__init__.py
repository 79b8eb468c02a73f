"""The ranks of a run: their grid, process groups and seeds, from the parallel sizes.

``python -m megatron_ext.parallel --tensor-model-parallel-size 2 --world-size 16`` prints the grid.
"""
