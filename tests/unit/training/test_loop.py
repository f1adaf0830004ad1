"""Tests that costly measurements are taken only every few steps."""

import torch
from torch import nn

from paceline.training.loop import Look, StepProbe, memory_in_use_bytes


def test_memory_follows_what_is_allocated() -> None:
    device = torch.device("cpu")
    before = memory_in_use_bytes(device)
    held = torch.ones(2**25)
    assert memory_in_use_bytes(device) - before > held.nbytes // 2


def test_only_steps_that_are_due_are_looked_at() -> None:
    probe = StepProbe(nn.Linear(4, 4), torch.device("cpu"), every_steps=2)
    looks = []
    for step in (1, 2, 3):
        probe.prepare(step)
        looks.append(probe.look(step))
    assert looks[0] == looks[2] == Look()
    assert looks[1].memory_bytes is not None
    assert looks[1].exposed_communication_s is None  # A single rank does not communicate.
    silent = StepProbe(nn.Linear(4, 4), torch.device("cpu"), every_steps=1, enabled=False)
    silent.prepare(4)
    assert silent.look(4) == Look()
