"""The class that Hydra finds; the work is in _core, which imports Dask only when a sweep asks for this launcher."""

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class DaskLauncher(Launcher):
    """Jobs go to the hosts of a Dask scheduler. The options are those of DaskLauncherConf."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.config: DictConfig | None = None
        self.hydra_context: HydraContext | None = None
        self.task_function: TaskFunction | None = None
        self.checked: dict[str, dict[str, Any]] = {}  # address -> what is known of hosts found fit already

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.hydra_context, self.task_function = config, hydra_context, task_function

    def preflight(self, outputs: str, wanted: Sequence[Mapping[str, Any]]) -> None:
        """Wait until a host is there that runs our code and has models and data. Starts no job.

        wanted: of each job `model` and `task` (plain configurations) and `memory` (bytes). Raises BadInput when there
        is no scheduler, no host, or none that is fit.
        """
        from . import _core

        self.checked = _core.preflight(self.options, outputs, wanted)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from . import _core

        return _core.launch(self, job_overrides, initial_job_idx)
