"""Beside examples/examples/phi.rs, with the model of transformers: torchrun --nproc-per-node 4 benchmarks/programs/phi.py"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import PhiConfig, PhiForCausalLM

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(42)
config = PhiConfig(
    vocab_size=50, hidden_size=32, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, use_cache=False
)
model = PhiForCausalLM(config)
plan = {
    "self_attn.q_proj": ColwiseParallel(),
    "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(),
    "self_attn.dense": RowwiseParallel(),
    "mlp.fc1": ColwiseParallel(),
    "mlp.fc2": RowwiseParallel(),
}
for layer in model.model.layers:
    parallelize_module(layer, mesh["tp"], plan)
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters())
text = (torch.arange(102) ** 2 % 50).reshape(6, 17).chunk(2)[mesh["dp"].get_local_rank()]
for _ in range(21):
    logits = model(text[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.all_reduce(loss, group=mesh["dp"].get_group())
if mesh.get_rank() == 0:
    print(f"loss {loss.item() / 2:.6f}")
dist.destroy_process_group()
