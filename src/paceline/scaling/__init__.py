"""Scaling laws: extrapolates from the losses of small runs to the best size of a large one.

`read_sweep` reads runs, `fit` fits every applicable method, `diagnose` reports problems with the
fit, `decide` picks a model for a budget, and `propose_runs` selects which candidates to run next.
"""

from paceline.core.finding import Finding
from paceline.scaling.decide import Decision, decide
from paceline.scaling.design import CandidateRun, candidate_runs, propose_runs
from paceline.scaling.diagnose import diagnose
from paceline.scaling.fits.all_methods import ScalingFit, fit
from paceline.scaling.fits.prediction import Prediction, predict
from paceline.scaling.readers import read_sweep
from paceline.scaling.surface import LossSurface
from paceline.scaling.sweep import Sweep
from paceline.scaling.synthetic import SweepDesign, synthetic_sweep

__all__ = [
    "CandidateRun",
    "Decision",
    "Finding",
    "LossSurface",
    "Prediction",
    "ScalingFit",
    "Sweep",
    "SweepDesign",
    "candidate_runs",
    "decide",
    "diagnose",
    "fit",
    "predict",
    "propose_runs",
    "read_sweep",
    "synthetic_sweep",
]
