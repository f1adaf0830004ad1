"""Tests of the project's structure: imports, exports and the documented tree."""

import ast
import graphlib
import importlib
import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

from tests.unit.project_files import project_files

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "paceline"

EXPORTS = {
    "paceline.core": {
        "BatchShape",
        "Device",
        "Estimate",
        "ModelShape",
        "PacelineError",
        "ParallelLayout",
        "Plan",
        "Precision",
        "UsageError",
        "find_device",
        "model_preset",
        "precision_preset",
        "preset_names",
    },
    "paceline.records": {
        "CaseValue",
        "Environment",
        "Kind",
        "Metric",
        "Outcome",
        "Record",
        "RecordStore",
        "capture_environment",
        "decode_plan",
        "encode_plan",
        "find_kind",
        "join_key",
        "known_kinds",
        "latest_per_case",
    },
    "paceline.accounting": {
        "attention_saved_bytes",
        "count_parameters",
        "flops_per_token",
        "minimum_step_bytes",
        "model_state_bytes",
        "peak_activation_bytes",
        "step_memory",
    },
    "paceline.kernels": {
        "BackendChoice",
        "TiledAttentionFunction",
        "TritonAttentionFunction",
        "attention",
        "attention_reference",
        "explain_backend",
        "flash_attention",
        "resolve_implementation",
    },
    "paceline.models": {"TransformerLM", "next_token_loss"},
    "paceline.parallel": {
        "BucketedDataParallel",
        "DataParallel",
        "DataParallelContainer",
        "FlatDataParallel",
        "FullyShardedDataParallel",
        "NaiveDataParallel",
        "OuterLoop",
        "OverlapWarning",
        "OverlappedDataParallel",
        "RankError",
        "RankPool",
        "Session",
        "ShardedDataParallel",
        "ShardedOptimizer",
        "SynchronizationError",
        "SynchronizationStats",
        "WrapPolicy",
        "distributed_session",
        "run_ranks",
    },
    "paceline.scaling": {
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
    },
    "paceline.lab": {"Host", "LabError", "LinkShape", "Site", "hosts", "sites"},
}
TORCH_FREE_ROOMS = (
    *("core", "records", "accounting", "predict", "planner", "scaling", "lab", "reports"),
    *("loop", "course", "cli"),
)


@pytest.mark.parametrize("module", EXPORTS)
def test_public_exports(module: str) -> None:
    loaded = importlib.import_module(module)
    assert set(loaded.__all__) == EXPORTS[module]
    assert loaded.__all__ == sorted(loaded.__all__)
    assert all(hasattr(loaded, name) for name in loaded.__all__)


def _torch_free_modules() -> list[str]:
    modules = ["paceline"]
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] in TORCH_FREE_ROOMS or parts[-1] == "config":
            modules.append(".".join(("paceline", *parts)).removesuffix(".__init__"))
    return modules


def test_the_planning_half_never_loads_torch() -> None:
    modules = _torch_free_modules()
    assert "paceline.benchmarks.config" in modules
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_parsing_a_command_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import sys\n"
        "import paceline.cli.main\n"
        "heavy = {'torch', 'numpy', 'scipy', 'matplotlib', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ranks_do_not_wait_for_a_compiler_that_they_may_not_need() -> None:
    code = (
        "import sys\n"
        "import paceline.benchmarks.strategies, paceline.models, paceline.parallel\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def _documented_tree() -> dict[str, set[str]]:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = re.search(r"```text\npaceline\n(.*?)```", text, re.DOTALL)
    assert block is not None
    entries: dict[str, set[str]] = {"": set(), "src/paceline/": set()}
    for line in block[1].splitlines():
        match = re.match(r"(│   )?[├└]── (\S+)", line)
        assert match is not None, line
        entries["src/paceline/" if match[1] else ""].add(match[2])
    return entries


def _directories(folder: pathlib.Path) -> set[str]:
    names = project_files(folder)
    return {f"{pathlib.PurePath(name).parts[0]}/" for name in names if "/" in name}


def test_the_documented_tree_is_the_tree_on_disk() -> None:
    documented = _documented_tree()
    on_disk = {name for name in _directories(ROOT) if not name.startswith(".")}
    assert documented[""] == (on_disk - {"src/"}) | {"src/paceline/"}
    assert documented["src/paceline/"] == _directories(PACKAGE)


def _import_graph() -> dict[str, set[str]]:
    """Returns every module of the package and the modules that it imports, also in functions."""
    paths = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
        for path in PACKAGE.rglob("*.py")
    }
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        imported: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                imported |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        graph[name] = (imported & set(paths)) - {name}
    return graph


def test_no_two_files_import_each_other() -> None:
    graph = _import_graph()
    assert len(graph) > 100
    graphlib.TopologicalSorter(graph).prepare()  # Raises an error that names the cycle.


_OPTIONAL = ("torchft",)
"""Modules of optional extras that the package imports and that may not be installed."""


@pytest.mark.parametrize("folder", ["course", "examples", "scripts", "studies"])
def test_programs_import_names_that_the_package_has(folder: str) -> None:
    """Checks imports of code that the type checker does not cover."""
    for name in project_files(ROOT / folder, "*.py"):
        for node in ast.walk(ast.parse((ROOT / folder / name).read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline"):
                try:
                    module = importlib.import_module(str(node.module))
                except ModuleNotFoundError as error:
                    if error.name not in _OPTIONAL:
                        raise
                    continue
                for alias in node.names:
                    submodule = f"{node.module}.{alias.name}"
                    found = hasattr(module, alias.name) or importlib.util.find_spec(submodule)
                    assert found, f"{folder}/{name} imports {submodule}, which does not exist"


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from paceline.cli.main import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'torch', 'numpy', 'typeguard', 'asyncio'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
