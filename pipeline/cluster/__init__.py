"""Many machines, one sweep: `python -m pipeline.cluster head|worker|status|install-service|describe|prefetch`.

One machine is the head: it runs Dask's scheduler and the MLflow server. Every machine with a GPU runs a worker, which
starts one job at a time. All share one certificate, `outputs/cluster/join.pem`, made by the head and copied by hand:
whoever holds it may run code on every machine, whoever does not is refused.
"""

from .join import Joined, joined

__all__ = ["Joined", "joined"]
