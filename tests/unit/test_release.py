"""Tests that the version, dependencies, CI jobs and templates of a release are consistent."""

import ast
import importlib.metadata
import itertools
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest
import yaml

import paceline

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "paceline"
_MODULES = {"mlflow-skinny": "mlflow"}
"""Packages whose module name differs from the package name."""
_IMPORTED_BY_OTHERS = {"alembic", "sqlalchemy", "tensorboard"}
"""Packages that only mlflow and torch import."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def _read_yaml(name: str) -> dict[object, object]:
    loaded = yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def test_the_citation_is_of_this_version_and_licence() -> None:
    citation = _read_yaml("CITATION.cff")
    assert citation["version"] == paceline.__version__
    assert citation["license"] == PROJECT["license"]


def test_the_package_says_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()


def _imported_packages() -> set[str]:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"paceline"}


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    extras = {
        name: lines for name, lines in PROJECT["optional-dependencies"].items() if name != "dev"
    }
    declared = [*PROJECT["dependencies"], *itertools.chain.from_iterable(extras.values())]
    names = {re.split(r"[^\w-]", line)[0] for line in declared} - _IMPORTED_BY_OTHERS
    assert _imported_packages() == {_MODULES.get(name, name) for name in names}


def _hosted_commands() -> dict[str, str]:
    """Returns the commands of each hosted job, with every value of its matrix filled in."""
    commands = {}
    for name, job in _read_yaml(".github/workflows/ci.yml")["jobs"].items():
        lines = "\n".join(step.get("run", "") for step in job["steps"])
        for key, values in job.get("strategy", {}).get("matrix", {}).items():
            variants = (lines.replace(f"${{{{ matrix.{key} }}}}", str(value)) for value in values)
            lines = "\n".join(variants)
        commands[name] = lines
    return commands


def test_hosted_checks_are_the_scripts() -> None:
    commands = _hosted_commands()
    assert set(commands) == {"check", "unit", "ranks", "nightly", "gpu"}
    assert "scripts/check" in commands["check"]
    assert "scripts/test unit" in commands["unit"]
    assert "scripts/test distributed" in commands["ranks"]
    assert "scripts/test end_to_end" in commands["ranks"]
    assert all(f"scripts/{job}" in commands["nightly"] for job in ("package", "test triton"))
    assert "scripts/test --gpu" in commands["gpu"]
    hooks = _read_yaml(".pre-commit-config.yaml")["repos"]
    assert [hook["entry"] for hook in hooks[0]["hooks"]] == ["scripts/check", "scripts/test"]
    run = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.search(r"^scripts/check .*&$", run, re.MULTILINE)
    assert re.search(r"^scripts/test \|\| status=\$\?$", run, re.MULTILINE)
    assert run.endswith('exit "$status"\n')


def test_a_suite_that_does_not_exist_is_an_error() -> None:
    run = subprocess.run([ROOT / "scripts" / "test", "units", "-q"], capture_output=True, text=True)
    assert run.returncode != 0
    assert "units" in run.stdout + run.stderr


@pytest.mark.parametrize(
    "template",
    ["ISSUE_TEMPLATE/bug.md", "ISSUE_TEMPLATE/measurement.md", "pull_request_template.md"],
)
def test_templates_ask_for_the_environment_and_a_record(template: str) -> None:
    text = (ROOT / ".github" / template).read_text(encoding="utf-8")
    assert "`paceline env" in text
    assert "record" in text.lower()


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_shells_complete_the_verbs(tmp_path: pathlib.Path, shell: str) -> None:
    target = tmp_path / "completion"
    subprocess.run(
        [sys.executable, "-m", "paceline", "--tyro-write-completion", shell, str(target)],
        check=True,
    )
    script = target.read_text(encoding="utf-8")
    assert all(verb in script for verb in ("bench", "calibrate", "--bucket-size-mb"))
    if shell == "bash":
        subprocess.run(["bash", "-n", str(target)], check=True)


def test_the_installed_version_is_the_version() -> None:
    assert importlib.metadata.version("paceline") == paceline.__version__
