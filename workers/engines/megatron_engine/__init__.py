"""Training and evaluation by megatron-core: tensor, pipeline and data parallelism."""
