"""From the losses of many small runs to the size of a large one, and how much to trust it.

`read_sweep` reads runs, `fit` fits every method that they allow, `diagnose` names what is wrong
with them, `decide` answers for a budget, `propose_runs` says what to run next.
"""

from paceline.scaling.campaign import propose_runs
from paceline.scaling.decide import Decision, decide
from paceline.scaling.diagnose import diagnose
from paceline.scaling.findings import Finding
from paceline.scaling.fitting import ScalingFit, fit
from paceline.scaling.prediction import Prediction, predict
from paceline.scaling.readers import read_sweep
from paceline.scaling.runs import Sweep
from paceline.scaling.surface import LossSurface
from paceline.scaling.synthetic import SweepDesign, synthetic_sweep

__all__ = [
    "Decision",
    "Finding",
    "LossSurface",
    "Prediction",
    "ScalingFit",
    "Sweep",
    "SweepDesign",
    "decide",
    "diagnose",
    "fit",
    "predict",
    "propose_runs",
    "read_sweep",
    "synthetic_sweep",
]
