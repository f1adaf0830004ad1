"""An accelerate script whose model is in a Paceline container; accelerate handles the rest.

    accelerate launch --cpu --num_processes 2 examples/elsewhere/accelerate_script.py

The model is not passed to prepare(), which would wrap it in torch's DDP.
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.parallel import BucketedDataParallel

torch.manual_seed(0)
inputs = torch.randn(160, 16)
dataset = TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))

# --8<-- [start:loop]
accelerator = Accelerator(cpu=True)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)).to(accelerator.device)
if accelerator.num_processes > 1:
    model = BucketedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
batch_size = 32 // accelerator.num_processes
optimizer, loader = accelerator.prepare(optimizer, DataLoader(dataset, batch_size))
for step, (batch, targets) in enumerate(loader):
    loss = nn.functional.mse_loss(model(batch), targets)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    # --8<-- [end:loop]
    mean = accelerator.reduce(loss.detach(), reduction="mean")
    accelerator.print(f"step {step}: loss {mean.item():.4f}")
accelerator.end_training()
