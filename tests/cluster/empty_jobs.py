"""A Hydra application whose jobs do nothing: `python empty_jobs.py -m hydra/launcher=dask number=range(200)`."""

from __future__ import annotations

import hydra
from omegaconf import DictConfig, OmegaConf

hydra.core.config_store.ConfigStore.instance().store(
    name="empty", node=OmegaConf.create({"number": 0, "outputs": "outputs", "hydra": {"output_subdir": None}})
)


@hydra.main(version_base="1.3", config_path=None, config_name="empty")
def main(cfg: DictConfig) -> int:
    return int(cfg.number)


if __name__ == "__main__":
    main()
