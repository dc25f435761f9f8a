"""`hydra/launcher=dask`: the jobs of a sweep spread over several machines, one at a time on each."""

from dataclasses import dataclass

from hydra.core.config_store import ConfigStore


@dataclass
class DaskLauncherConf:
    """Options of the launcher, as `hydra.launcher.retries=5`."""

    _target_: str = "hydra_plugins.dask_launcher.dask_launcher.DaskLauncher"
    head: str | None = None  # where the scheduler is, ADDRESS[:PORT]; null = as outputs/cluster/join.pem says
    retries: int = 2  # times a job is started again after its process died; a job that raises is not
    wait_for_hosts_s: float = 600  # no host that can be used for so long: the rest of the jobs FAILED
    poll_s: float = 1  # how often the scheduler is asked for its hosts


ConfigStore.instance().store(group="hydra/launcher", name="dask", node=DaskLauncherConf, provider="dask_launcher")
