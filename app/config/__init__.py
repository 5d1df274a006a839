"""Configuration: the schema behind `conf/`, every check on it, and loading.

`load` turns a command line into one frozen `Config`; whatever is wrong with it is a one-line `ConfigError`.
"""

from app.config.chaos import CORRUPTIONS, LEARNER_FAULTS, ChaosConfig, Fault, Rates
from app.config.check import check, check_fragments
from app.config.compose import as_yaml, from_yaml, load
from app.config.error import ConfigError
from app.config.help import describe
from app.config.pools import ElasticConfig, PoolConfig, SyncerConfig
from app.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    ModelConfig,
    Pool,
    RunConfig,
    SupervisorConfig,
    TrackingConfig,
    TrainConfig,
)

__all__ = [
    "CORRUPTIONS",
    "LEARNER_FAULTS",
    "ChaosConfig",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "ElasticConfig",
    "EvalConfig",
    "Fault",
    "ModelConfig",
    "Pool",
    "PoolConfig",
    "Rates",
    "RunConfig",
    "SupervisorConfig",
    "SyncerConfig",
    "TrackingConfig",
    "TrainConfig",
    "as_yaml",
    "check",
    "check_fragments",
    "describe",
    "from_yaml",
    "load",
]
