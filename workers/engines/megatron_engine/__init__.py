"""Training and evaluation by megatron-core: tensor, pipeline and data parallelism.

What it shares with FSDP is in `sharded`.
"""
