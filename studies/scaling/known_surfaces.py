"""Evaluates intervals, warnings and designs of scaling laws on known surfaces.

    python -m studies.scaling.known_surfaces results/scaling-studies.jsonl

Appends `scaling_study` records to the store.
"""

import dataclasses
import pathlib
import sys

from paceline.records import CaseValue
from paceline.scaling.synthetic import Departure
from studies.harness.records import append_record
from studies.harness.study import study_parser
from studies.scaling.coverage import coverage_study, warning_study
from studies.scaling.fake_training_service import design_study

_NOISE = 0.005
_STUDIES = ("coverage", "warnings", "design")
_DEPARTURES = {
    "none": Departure(),
    "drift 0.05": Departure(drift=0.05),
    "drift 0.1": Departure(drift=0.1),
    "drift 0.2": Departure(drift=0.2),
    "untuned learning rate 0.001": Departure(untuned_learning_rate=0.001),
    "untuned learning rate 0.002": Departure(untuned_learning_rate=0.002),
    "untuned learning rate 0.005": Departure(untuned_learning_rate=0.005),
    "untuned learning rate 0.01": Departure(untuned_learning_rate=0.01),
    "fixed warm-up of 1e8 tokens": Departure(fixed_warmup_tokens=1e8),
    "fixed warm-up of 2e8 tokens": Departure(fixed_warmup_tokens=2e8),
}


def main() -> int:
    """Runs the selected studies."""
    parser = study_parser(__doc__)
    parser.add_argument("--sweeps", type=int, default=500)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--warning-sweeps", type=int, default=200)
    parser.add_argument("--surfaces", type=int, default=50)
    parser.add_argument("--studies", nargs="+", choices=_STUDIES, default=_STUDIES)
    arguments = parser.parse_args()
    store = arguments.store
    if "coverage" in arguments.studies:
        study_coverage(store, arguments.sweeps, arguments.draws)
    if "warnings" in arguments.studies:
        study_warnings(store, arguments.warning_sweeps)
    if "design" in arguments.studies:
        study_design(store, arguments.surfaces)
    return 0


def study_coverage(store: pathlib.Path, num_sweeps: int, num_draws: int) -> None:
    """Records how often intervals contain the truth."""
    for coverage in coverage_study(num_sweeps=num_sweeps, num_draws=num_draws, noise=_NOISE):
        values = {
            "covered": coverage.covered,
            "covered_loss": coverage.covered_loss,
            "bias": coverage.bias,
            "deviation": coverage.deviation,
            "interval_ratio": coverage.width,
        }
        case = {"num_sweeps": num_sweeps, "num_draws": num_draws, "level": 0.9}
        _append(store, f"coverage of {coverage.method}", values, case, _NOISE)


def study_warnings(store: pathlib.Path, num_sweeps: int) -> None:
    """Records how often departures from the surface cause a warning."""
    for name, departure in _DEPARTURES.items():
        for noise in (0.002, _NOISE):
            rate, bias = warning_study(num_sweeps=num_sweeps, noise=noise, departure=departure)
            case = {"departure": name, "num_sweeps": num_sweeps}
            _append(store, "warning", {"warned": rate, "bias": bias}, case, noise)


def study_design(store: pathlib.Path, num_surfaces: int) -> None:
    """Records how far designs and even grids miss the best model."""
    for noise in (0.003, 0.01):
        for name, error in design_study(num_surfaces=num_surfaces, noise=noise).items():
            case = {"num_sweeps": num_surfaces, "total_flops": 2e18}
            _append(store, f"error of the {name}", dataclasses.asdict(error), case, noise)


def _append(
    store: pathlib.Path,
    study: str,
    values: dict[str, float],
    case: dict[str, CaseValue],
    noise: float,
) -> None:
    append_record(store, "scaling_study", {"study": study, "noise": noise, **case}, values)
    figures = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
    print(f"{study}, {case.get('departure', '')} noise {noise}: {figures}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
