"""The update rules that a config can name. Each has a file in this package, and is a member of the union."""

from modeling.optimizers.adamw import AdamWConfig
from modeling.optimizers.muon import MuonConfig
from modeling.optimizers.sgd import SGDConfig

OptimizerConfig = AdamWConfig | SGDConfig | MuonConfig
