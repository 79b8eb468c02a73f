"""Pipeline schedules as data: made, drawn, priced, proven, and run by one small runtime.

``python -m megatron_ext.schedules`` draws one and tells its bubble.
"""
