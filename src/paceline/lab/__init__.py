"""A virtual cluster on one machine: hosts behind shaped links, and a disposable Slurm."""

from paceline.lab.network import Host, LabError, LinkShape, Site, hosts, sites

__all__ = ["Host", "LabError", "LinkShape", "Site", "hosts", "sites"]
