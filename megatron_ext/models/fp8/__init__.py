"""Linear layers that multiply in 8-bit floating point, without Transformer Engine.

A layer's three products (forward, gradient of the input, gradient of the weight) take 8-bit
matrices with a scale each, and sum in float32 (arXiv:2209.05433). `formats` casts, `passes` makes
few passes over memory of it, `scaling` says where scales come from and `parts` which ranks hold the
rest of a tensor, `product` multiplies, `linear` is the layer's autograd function, `weights` keeps
8-bit weights for a step, `history` moves the delayed scales on after it, and `attach` turns a
model's layers into such layers.
"""
