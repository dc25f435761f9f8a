"""The experiments: load, generate, score, publish, composed by Hydra and tracked in MLflow."""
