"""Executes runs as a Slurm job array, through submitit.

Jobs may be requeued: a lost node, a preemption or the time limit costs a run only the work since
its newest checkpoint. Whether a run has ended is read from its directory, not from Slurm's
accounting (sacct), which many clusters lack. Slurm only reports which jobs are pending or running.
"""

import pathlib
import subprocess
import time
from collections.abc import Iterator, Sequence

from paceline.core.errors import UsageError
from paceline.workflows.sweep.task import RunTask, has_ended, run_task

_POLL_S = 1.0
_LOGS = "slurm"
_FORGOTTEN = "Invalid job id"


class SlurmExecutor:
    """Executes runs as a job array.

    Args:
        directory: The sweep's directory, shared by all nodes.
        at_once: Number of concurrent jobs; None for as many as Slurm starts.
        partition: Partition for the jobs; None for the default.
        time_limit_min: Time limit of a job in minutes.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        at_once: int | None,
        partition: str | None,
        time_limit_min: int,
    ) -> None:
        try:
            import submitit
        except ModuleNotFoundError as error:
            raise UsageError(
                "--executor slurm needs the package submitit; pip install 'paceline[slurm]'"
            ) from error
        self._executor = submitit.SlurmExecutor(folder=directory.resolve() / _LOGS)
        self._at_once = at_once
        self._options = {} if partition is None else {"partition": partition}
        self._time_limit_min = time_limit_min

    def run(self, tasks: Sequence[RunTask]) -> Iterator[str]:
        """Yields the label of each run when it has ended."""
        self._executor.update_parameters(
            job_name="paceline-sweep",
            nodes=1,
            ntasks_per_node=1,
            cpus_per_task=tasks[0].ranks * tasks[0].threads,
            time=self._time_limit_min,
            array_parallelism=self._at_once or len(tasks),
            additional_parameters={"requeue": True},
            **self._options,
        )
        jobs = self._executor.map_array(run_task, tasks)
        waiting = {job.job_id: task for job, task in zip(jobs, tasks, strict=True)}
        array = jobs[0].job_id.partition("_")[0]
        try:
            while waiting:
                # Query Slurm before the directories: a job that is gone has written everything.
                alive = _alive(array)
                for job_id, task in list(waiting.items()):
                    if has_ended(task):
                        del waiting[job_id]
                        yield task.label
                    elif alive is not None and job_id not in alive:
                        del waiting[job_id]
                time.sleep(_POLL_S)
        finally:
            if waiting:
                subprocess.run(["scancel", array], check=False)


def _alive(array: str) -> set[str] | None:
    """Returns the pending and running jobs of an array, such as 12_3; None if Slurm is silent."""
    listed = subprocess.run(
        ["squeue", "--noheader", "--array", f"--jobs={array}", "--format=%F_%K"],
        capture_output=True,
        text=True,
    )
    # Slurm forgets an array some time after its last job has ended. Any other failure, such as a
    # controller that restarts, does not mean that the jobs are gone.
    if listed.returncode and _FORGOTTEN not in listed.stderr:
        return None
    return set(listed.stdout.split())
