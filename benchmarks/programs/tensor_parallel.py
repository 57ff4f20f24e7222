"""Beside examples/examples/tensor-parallel.rs: torchrun --nproc-per-node 2 benchmarks/programs/tensor_parallel.py"""

import os
from collections import OrderedDict

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("tp",))
torch.manual_seed(42)
model = nn.Sequential(OrderedDict(up=nn.Linear(8, 64), gelu=nn.GELU("tanh"), down=nn.Linear(64, 8)))
parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
x = torch.arange(128.0).sin().reshape(16, 8)
for _ in range(20):
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
loss = (model(x) - x).square().mean()
if mesh.get_rank() == 0:
    print(f"loss {loss.item():.6f}")
torch.distributed.destroy_process_group()
