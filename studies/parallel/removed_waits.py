"""Removes what orders streams, edit by edit: does the emulated device flag each?

    python -m studies.parallel.removed_waits results/mutants/removed-waits.jsonl

Every wait for a message or a stream, every event and every `non_blocking` flag of the code between
a batch and the optimizer's step is removed or inverted, one at a time, in a copy of the package
that contains all edits (studies/mutation). A removal is flagged if a test on the emulated device
fails: for a race, for a wait of the host that was not there before, or for other numbers. A removal
whose effect nobody could observe is marked in the results with the reason, which later runs keep.
"""

import ast
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Sequence

from studies.harness.study import ROOT, study_parser
from studies.mutation.mutants import Instrumenter
from studies.mutation.run import Workers, note_tests, run_mutants, write_package

_MODULES = (
    *("parallel/reducer", "parallel/traffic", "parallel/ranks/pending", "parallel/bucket_size"),
    *("parallel/zero", "parallel/fsdp", "parallel/mesh", "training/step"),
    *("data/loader/torch_batches", "checkpoint/dcp_writer", "devices/accelerator"),
)
_WAITS = (
    *("wait", "follow", "_follow_writer", "wait_in_stream", "wait_stream"),
    *("synchronize", "record", "record_stream"),
)
_TESTS = (
    *("tests/emulated/test_containers.py", "tests/emulated/test_training_step.py"),
    *("tests/emulated/test_seam.py", "tests/distributed/test_data_parallel.py"),
    *("tests/distributed/test_training_layouts.py", "tests/distributed/test_training.py"),
    *("tests/distributed/test_gradient_weights.py", "tests/distributed/test_bucket_size.py"),
    *("tests/distributed/test_sharded_data_parallel.py", "tests/distributed/test_strategies.py"),
    *("tests/distributed/test_sharded_optimizer.py", "tests/distributed/test_fully_sharded.py"),
    *("tests/distributed/test_sharded_in_flight.py", "tests/distributed/test_checkpoint.py"),
    *("tests/distributed/test_fully_sharded_schedule.py", "tests/distributed/test_mesh.py"),
    "tests/distributed/test_fully_sharded_contract.py",
)


class Waits(Instrumenter):
    """Leaves out waits, points in streams and side streams, and inverts `non_blocking` flags."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        is_wait = isinstance(node.value, ast.Call) and _name(node.value.func) in _WAITS
        return self.lost(node) if is_wait else self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if isinstance(node.value, ast.Call) and _name(node.value.func) == "point_in_stream":
            node.value = self.choice(node.value, node.value, ast.Constant(None))
            return node
        return self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        if node.arg == "non_blocking":
            node.value = self.choice(node.value, node.value, ast.UnaryOp(ast.Not(), node.value))
            return node
        return self.generic_visit(node)

    def visit_With(self, node: ast.With) -> ast.AST:
        item = node.items[0]
        if "side_stream" in ast.unparse(item):
            same_stream = ast.parse("__import__('contextlib').nullcontext()", mode="eval").body
            item.context_expr = self.choice(item.context_expr, item.context_expr, same_stream)
        return self.generic_visit(node)


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes a summary and one line per removal; returns 1 if fewer than 90% are flagged."""
    parser = study_parser(__doc__, store=None)
    parser.add_argument("results", type=pathlib.Path, help="file that the rows are written to")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="one per core")
    parser.add_argument("--seconds", type=float, default=60.0, help="of tests for each removal")
    options = parser.parse_args(arguments)
    os.environ["PACELINE_TEST_DEVICE"] = "emulated"
    os.environ["PYTHONPATH"] = str(ROOT / "tests/emulated/plugin")
    reasons = _reasons(options.results)
    with tempfile.TemporaryDirectory() as directory:
        place = pathlib.Path(directory)
        rooms = write_package(place, _MODULES, Waits)
        removals = [each for room in rooms.values() for each in room]
        with Workers(place, _TESTS, options.workers, len(removals)) as workers:
            flagged = run_mutants(workers, removals, note_tests(workers, _TESTS), options.seconds)
    rows = [
        {
            "path": each.path,
            "line": each.line,
            "function": each.function,
            "before": each.before,
            "after": each.after,
            "flagged_by": flagged[each],
            "equivalent": reasons.get((each.path, each.function, each.before), ""),
        }
        for each in removals
    ]
    equivalent = sum(row["flagged_by"] is None and row["equivalent"] != "" for row in rows)
    num_flagged = sum(row["flagged_by"] is not None for row in rows)
    share = num_flagged / (len(rows) - equivalent)
    summary = {
        "removals": len(rows),
        "flagged": num_flagged,
        "equivalent": equivalent,
        "share": round(share, 4),
    }
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in (summary, *rows))
    options.results.write_text(lines, encoding="utf-8")
    print(f"{len(rows)} removals, {num_flagged} flagged, {equivalent} without effect, {share:.1%}")
    return 0 if share >= 0.9 else 1


def _reasons(path: pathlib.Path) -> dict[tuple[str, str, str], str]:
    """Returns why removals of an earlier run have no effect, by file, function and statement."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    return {(row["path"], row["function"], row["before"]): row["equivalent"] for row in rows}


if __name__ == "__main__":
    sys.exit(main())
