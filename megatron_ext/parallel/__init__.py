"""The ranks of a run: sizes give the rank grid, process groups and seeds.

``python -m megatron_ext.parallel --tensor-model-parallel-size 2 --world-size 16`` prints the grid.
"""
