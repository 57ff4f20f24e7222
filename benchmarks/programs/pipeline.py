"""Beside examples/examples/pipeline.rs. The microbatches of PyTorch's pipelines have equal sizes, so the batch has 16 rows here.

torchrun --nproc-per-node 3 benchmarks/programs/pipeline.py 0 FOLDER
torchrun --nproc-per-node 2 benchmarks/programs/pipeline.py 5 FOLDER
"""

import sys
from collections import OrderedDict

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("gloo")
rank, stages = dist.get_rank(), dist.get_world_size()
torch.manual_seed(42)
layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(6)]
own = range(6 * rank // stages, 6 * (rank + 1) // stages)
model = nn.Sequential(OrderedDict((str(i), layers[i]) for i in own))
stage = PipelineStage(model, rank, stages, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
options = StateDictOptions(flatten_optimizer_state_dict=True)
start, folder = int(sys.argv[1]), sys.argv[2]
if start > 0:
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options)))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options
    )
x = torch.arange(64.0).sin().reshape(16, 4)
for step in range(start, 10):
    optimizer.zero_grad()
    losses = []
    if rank == 0:
        schedule.step(x)
    elif rank < stages - 1:
        schedule.step()
    else:
        schedule.step(target=x, losses=losses)
        print(f"step {step}: loss {torch.stack(losses).mean().item():.6f}")
    optimizer.step()
    if step == 4:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options)))
        dcp.save(state, checkpoint_id=folder)
dist.destroy_process_group()
