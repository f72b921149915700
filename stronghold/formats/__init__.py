"""What files hold: safetensors, the manifest of a checkpoint with its checksums, DCP, transformers' folders."""
