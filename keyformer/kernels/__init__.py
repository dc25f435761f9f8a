"""GPU kernels: one Metal source each, which ships and runs under MLX's CUDA back-end too. A CPU builds none."""
