"""The frozen blocks split over the processes of a group by FSDP2: each block is whole only while it runs.

Embeddings, heads and whatever else lies outside the blocks are replicated: the head is read outside a forward pass.
"""

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lsp_core.distributed import Group
from lsp_core.units import find_blocks


def shard_blocks(model: nn.Module, group: Group) -> None:
    """Freezes ``model`` and leaves this process its part of each block's parameters, in place and for good.

    The model may lie on the CPU: block by block, its parts go to the group's device, and then the rest.
    Errors: ``ValueError`` where blocks share a parameter.
    """
    model.requires_grad_(False)
    if group.size == 1:
        if group.device is not None:
            model.to(group.device)
        return
    device = group.device or next(model.parameters()).device
    blocks = list({id(block): block for block in find_blocks(model)}.values())
    owners: dict[int, int] = {}
    for index, block in enumerate(blocks):
        for name, parameter in block.named_parameters():
            if owners.setdefault(id(parameter), index) != index:
                raise ValueError(f"{name} belongs to more than one block: train with sharding replicated")
    mesh = init_device_mesh(device.type, (group.size,))
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    inside = {id(module) for block in blocks for module in block.modules()}
    for module in model.modules():
        if id(module) in inside:
            continue
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def local_bytes(module: nn.Module) -> int:
    """Returns the bytes of parameters that this process holds."""
    local = (getattr(p, "to_local", lambda p=p: p)() for p in module.parameters())
    return sum(tensor.untyped_storage().nbytes() for tensor in local)
