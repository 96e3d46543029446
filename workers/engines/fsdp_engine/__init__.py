"""Training and evaluation by PyTorch's FSDP2, with tensor parallelism.

What it shares with Megatron is in `sharded`.
"""
