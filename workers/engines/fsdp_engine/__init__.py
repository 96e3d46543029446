"""Training and evaluation by PyTorch's FSDP2, with tensor parallelism.

What it shares with Megatron is in `divided_network.py` of the folder above.
"""
