"""A virtual cluster on one machine: hosts behind shaped links, and a disposable Slurm."""

from paceline.lab.network import Host, LabError, hosts
from paceline.lab.shaping import LinkShape

__all__ = ["Host", "LabError", "LinkShape", "hosts"]
