"""Beside examples/examples/fsdp.rs: torchrun --nproc-per-node 4 benchmarks/programs/fully_sharded.py"""

import os

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x), approximate="tanh"))


mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("dp",))
torch.manual_seed(42)
model = nn.Sequential(*[Block() for _ in range(4)])
for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
x = torch.arange(768.0).sin().reshape(12, 64).chunk(mesh.size())[mesh.get_rank()]
for _ in range(10):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
loss = model(x).square().mean()
torch.distributed.all_reduce(loss)
if mesh.get_rank() == 0:
    print(f"loss {loss.item() / mesh.size():.6f}; a rank holds {sum(p.to_local().numel() for p in model.parameters())}")
torch.distributed.destroy_process_group()
