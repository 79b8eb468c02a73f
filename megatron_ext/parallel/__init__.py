"""The ranks of a run: their positions in a grid, their process groups and their random seeds.

``python -m megatron_ext.parallel --tensor-model-parallel-size 2 --world-size 16`` prints the grid.
"""
