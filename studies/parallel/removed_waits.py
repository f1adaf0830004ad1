"""Removes what orders streams, edit by edit: does the emulated device flag each?

    python -m studies.parallel.removed_waits results/removed-waits.jsonl

Every wait for a message or a stream, every event and every `non_blocking` flag of the code between
a batch and the optimizer's step is removed or inverted in a copy of the package, one at a time. A
removal is flagged if a test on the emulated device fails: for a race, for a wait of the host that
was not there before, or for other numbers.
"""

import ast
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

from studies.harness.study import ROOT, study_parser

_PACKAGE = ROOT / "src/paceline"
_FILES = (
    *("parallel/reducer.py", "parallel/traffic.py", "parallel/ranks/pending.py"),
    *("parallel/zero/container.py", "parallel/zero/optimizer.py", "parallel/zero/bucket.py"),
    *("parallel/zero/flat_parameters.py", "parallel/zero/shard_optimizer.py"),
    *("parallel/fsdp/layer.py", "parallel/fsdp/schedule.py", "parallel/mesh/pipeline.py"),
    *("parallel/bucket_size.py", "training/step.py", "data/loader/torch_batches.py"),
    *("checkpoint/dcp_writer.py", "devices/accelerator.py"),
)
_WAITS = (
    "wait",
    "follow",
    "_follow_writer",
    "wait_in_stream",
    "synchronize",
    "record",
    "wait_stream",
)
_TESTS = (
    *("tests/emulated/test_containers.py", "tests/emulated/test_training_step.py"),
    *("tests/distributed/test_training_layouts.py", "tests/distributed/test_training.py"),
)
_MOST_S = 900.0


@dataclasses.dataclass(frozen=True)
class Removal:
    """An edit of one statement or argument."""

    path: str
    line: int
    before: str
    after: str
    begin: int
    end: int
    """Where it stands in the file, in bytes."""

    def apply(self, source: bytes) -> bytes:
        """Returns the file with this edit."""
        return source[: self.begin] + self.after.encode() + source[self.end :]


def removals(path: str) -> Iterator[Removal]:
    """Yields the edits of a file of the package."""
    source = (_PACKAGE / path).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def made(node: ast.expr | ast.stmt, after: str) -> Removal:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        return Removal(path, node.lineno, source[begin:end].decode(), after, begin, end)

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            if _name(node.value.func) in _WAITS:
                yield made(node, "pass")
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            if _name(node.value.func) == "point_in_stream":
                yield made(node.value, "None")
        elif isinstance(node, ast.keyword) and node.arg == "non_blocking":
            yield made(node.value, "False" if ast.unparse(node.value) == "True" else "True")
        elif isinstance(node, ast.With) and "side_stream" in ast.unparse(node.items[0]):
            yield made(node.items[0].context_expr, "__import__('contextlib').nullcontext()")


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)


def flagged_by(removal: Removal) -> str | None:
    """Returns the test that fails with a removal; None if all pass."""
    with tempfile.TemporaryDirectory() as place:
        package = pathlib.Path(place) / "paceline"
        shutil.copytree(_PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
        file = package / removal.path
        file.write_bytes(removal.apply(file.read_bytes()))
        path = os.pathsep.join([place, str(ROOT), str(ROOT / "tests/emulated/plugin")])
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", *_TESTS],
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": path,
                    "PACELINE_TEST_DEVICE": "emulated",
                    "OMP_NUM_THREADS": "1",
                },
                capture_output=True,
                text=True,
                timeout=_MOST_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "no test ended"
    if done.returncode == 0:
        return None
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    return failed[0].split()[1] if failed else done.stdout[-200:]


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes one line per removal, and a summary first."""
    parser = study_parser(__doc__, store=None)
    parser.add_argument("results", type=pathlib.Path, help="file that the rows are written to")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="one per core")
    options = parser.parse_args(arguments)
    chosen = [removal for path in _FILES for removal in removals(path)]
    with concurrent.futures.ThreadPoolExecutor(options.workers) as threads:
        rows = []
        for removal, test in zip(chosen, threads.map(flagged_by, chosen), strict=True):
            row = {
                **{name: getattr(removal, name) for name in ("path", "line", "before", "after")},
                "flagged_by": test,
            }
            rows.append(row)
            sys.stderr.write(f"{len(rows)} of {len(chosen)}: {json.dumps(row)}\n")
    summary = {"removals": len(rows), "flagged": sum(row["flagged_by"] is not None for row in rows)}
    lines = "".join(json.dumps(row) + "\n" for row in (summary, *rows))
    options.results.write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
