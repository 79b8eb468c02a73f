"""Sizes -> rank grid -> process groups -> RNG seeds.

``python -m megatron_ext.parallel --tensor-model-parallel-size 2 --world-size 16`` prints the grid.
"""
