"""Tests that the version, dependencies, CI jobs and templates of a release are consistent."""

import ast
import importlib.metadata
import itertools
import pathlib
import re
import subprocess
import sys
import tomllib

import packaging.requirements
import packaging.utils
import packaging.version
import pytest
import yaml

import paceline

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "paceline"
_MODULES = {"mlflow-skinny": "mlflow"}
"""Packages whose module name differs from the package name."""
_IMPORTED_BY_OTHERS = {"alembic", "sqlalchemy"}
"""Packages that only mlflow imports."""
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


_PIPELINES = sorted((ROOT / ".github").glob("workflows/*.yml"))
_ACTIONS = sorted((ROOT / ".github").glob("actions/*/action.yml"))
_IMAGES = sorted((ROOT / "docker").glob("*.Dockerfile"))


@pytest.mark.parametrize("path", [*_PIPELINES, *_ACTIONS], ids=lambda path: path.stem)
def test_actions_are_named_by_commit(path: pathlib.Path) -> None:
    """A tag can be moved to other code, a commit cannot."""
    lines = re.findall(r"uses: (.*)", path.read_text(encoding="utf-8"))
    assert lines
    for line in lines:
        assert re.fullmatch(r"\./\S+|[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line


@pytest.mark.parametrize("path", _IMAGES, ids=lambda path: path.stem)
def test_images_have_a_digest_and_a_user(path: pathlib.Path) -> None:
    text = path.read_text(encoding="utf-8")
    names = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
    stages = re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]
    assert len(stages) == 2
    for stage in stages:
        image = re.sub(r"\$\{(\w+)\}", lambda found: names[found[1]], stage.split()[0])
        assert re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", image), image
    users = re.findall(r"^USER (\S+)$", stages[-1], re.MULTILINE)
    assert users
    assert users[-1] not in ("root", "0")


def _pins() -> dict[str, list[packaging.version.Version]]:
    """Returns the versions that constraints.txt has of each package."""
    found: dict[str, list[packaging.version.Version]] = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.lstrip().startswith("#"):
            requirement = packaging.requirements.Requirement(line)
            (pin,) = requirement.specifier
            assert pin.operator == "==", line
            name = packaging.utils.canonicalize_name(requirement.name)
            found.setdefault(name, []).append(packaging.version.Version(pin.version))
    return found


def test_everything_is_installed_with_the_constraints() -> None:
    pins = _pins()
    extras = itertools.chain.from_iterable(PROJECT["optional-dependencies"].values())
    for line in (*PROJECT["dependencies"], *extras):
        requirement = packaging.requirements.Requirement(line)
        versions = pins[packaging.utils.canonicalize_name(requirement.name)]
        assert all(version in requirement.specifier for version in versions), line
    files = (*_PIPELINES, *_ACTIONS, *_IMAGES, ROOT / ".ci" / "run", ROOT / "scripts" / "audit")
    installed = 0
    for path in files:
        for line in re.findall(r"pip\"? install (.*)", path.read_text(encoding="utf-8")):
            if "--upgrade pip" not in line:
                assert "--constraint" in line, (path, line)
                installed += 1
    assert installed >= 8


@pytest.mark.parametrize("path", _PIPELINES, ids=lambda path: path.stem)
def test_workflows_have_no_more_rights_than_they_need(path: pathlib.Path) -> None:
    workflow = _read_yaml(f".github/workflows/{path.name}")
    assert workflow["permissions"] == {"contents": "read"}
    # The file's text would show a secret wherever it is used.
    assert "secrets." not in path.read_text(encoding="utf-8")
    for name, job in workflow["jobs"].items():
        rights = {key for key, value in job.get("permissions", {}).items() if value == "write"}
        expected = {"build": {"id-token", "attestations"}, "publish": {"id-token"}}
        assert rights == (expected[name] if path.stem == "release" else set())
        for step in job["steps"]:
            if "checkout" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False


def test_a_release_is_audited() -> None:
    jobs = _read_yaml(".github/workflows/release.yml")["jobs"]
    commands = [step.get("run", "") for step in jobs["build"]["steps"]]
    assert commands.index("scripts/package dist") < commands.index("scripts/audit bill")
    assert jobs["publish"]["needs"] == "build"
    audit = (ROOT / "scripts" / "audit").read_text(encoding="utf-8")
    assert re.search(r"cyclonedx-py.* environment", audit)
    assert re.search(r"pip-audit\" --strict", audit)


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
