"""A virtual cluster on one machine: hosts behind shaped links, and a disposable Slurm."""

from paceline.lab.network import Host, LabError, LinkShape, hosts

__all__ = ["Host", "LabError", "LinkShape", "hosts"]
