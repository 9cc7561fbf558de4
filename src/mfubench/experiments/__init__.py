"""From a study's YAML to named runs. Three verbs declare every experiment:

- `cases`: each differs from the base.
- `ladder`: each inherits the one before.
- `grid`: the product of the keys that hold lists.

and `search` (in the memory stage) declares a memory limit to be found. The key is the file name:
results/<study>/runs/tiers/tier3.json exists because `experiments.tiers.ladder.tier3` does. No torch here.
"""

from mfubench.experiments.checks import leaves_checkpoint
from mfubench.experiments.expand import Study, build_run, expand_study, warn_of_cpu
from mfubench.experiments.overrides import Overrides, merge, nest, parse_overrides, resolve_extends
from mfubench.experiments.schema import STAGES, EffectConfig, StudyConfig

__all__ = [
    "STAGES",
    "EffectConfig",
    "Overrides",
    "Study",
    "StudyConfig",
    "build_run",
    "expand_study",
    "leaves_checkpoint",
    "merge",
    "nest",
    "parse_overrides",
    "resolve_extends",
    "warn_of_cpu",
]
