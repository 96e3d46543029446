"""Training and evaluation by megatron-core: tensor, pipeline and data parallelism.

What it shares with FSDP is in `divided_network.py` of the folder above.
"""
