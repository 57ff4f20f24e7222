"""Beside examples/examples/lookup.rs: torchrun --nproc-per-node 4 benchmarks/programs/lookup.py

PyTorch has no table of rows with their own optimizer in front of a mesh. The closest is an embedding that is cut by rows over one
axis and fully sharded over the other, whose gradient has all rows.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(1000, 16), nn.Linear(16, 64), nn.Linear(64, 1)

    def forward(self, ids):
        return self.down(nn.functional.gelu(self.up(self.table(ids).mean(1)), approximate="tanh"))


mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(42)
model = Model()
table = RowwiseParallel(input_layouts=Replicate())
parallelize_module(model, mesh["tp"], {"table": table, "up": ColwiseParallel(), "down": RowwiseParallel()})
fully_shard(model, mesh=mesh["dp"])
by_rows = torch.optim.Adagrad(model.table.parameters(), lr=0.1)
optimizer = torch.optim.AdamW([*model.up.parameters(), *model.down.parameters()], lr=0.003)
ids = (torch.arange(40) ** 2 * 7919 % 1000).reshape(10, 4).chunk(2)[mesh["dp"].get_local_rank()]
for _ in range(11):
    loss = (model(ids) - 1).square().mean()
    optimizer.zero_grad()
    by_rows.zero_grad()
    loss.backward()
    optimizer.step()
    by_rows.step()
dist.all_reduce(loss, group=mesh["dp"].get_group())
if mesh.get_rank() == 0:
    print(f"loss {loss.item() / 2:.6f}")
dist.destroy_process_group()
