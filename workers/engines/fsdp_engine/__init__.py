"""Training and evaluation by PyTorch's FSDP2, with tensor parallelism."""
