"""Reads weights of GPT models from checkpoints that Megatron-LM and DeepSpeed wrote.

`source` finds which form a folder has. Each form has a file that opens it as a `Source`, in which
every tensor has Megatron's name for it in the whole model, whatever the layout that saved it.
"""
