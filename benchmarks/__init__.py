"""Side by side with mlx-lm and the peer library, in one process, as ratios.

python -m benchmarks.gpu [--only NAME ...] [--json FILE] [--tiny]
python -m benchmarks.cpu [--only NAME ...] [--json FILE] [--tiny]
"""
