"""Pipeline schedules as data, which can be drawn, simulated, and run by one runtime.

``python -m megatron_ext.schedules`` draws a schedule and prints its bubble.
"""
