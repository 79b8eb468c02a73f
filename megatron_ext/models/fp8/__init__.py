"""Linear layers that multiply in 8-bit floating point, without Transformer Engine.

A layer's three products (forward, gradient of the input, gradient of the weight) take 8-bit
matrices with a scale each, and sum in float32 (arXiv:2209.05433). `formats` casts, `scaling` says
where scales come from, `product` multiplies, `linear` is the layer's autograd function, `history`
moves the delayed scales on after a step, and `attach` turns a model's layers into such layers.
"""
