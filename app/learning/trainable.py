"""A model made ready to train: activations, compilation, device and precision, and how a group's ranks share it.

fp32 master weights always, bf16 by autocast. With DDP every rank has a copy and accelerate averages the gradients. With
FSDP2 every rank has a part of each parameter, and of its optimizer state; accelerate's own FSDP2 is for accelerators
alone, so that torch's `fully_shard` is called here, the same on CPUs and GPUs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from app.config import ConfigError, TrainConfig
from app.learning.optimizer import build_optimizers
from app.learning.ranks import Ranks
from app.learning.shards import check_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def trainable(
    model: PreTrainedModel, config: TrainConfig, ranks: Ranks | None
) -> tuple[Any, nn.Module, list[torch.optim.Optimizer]]:
    """Return the process' Accelerator, the model to call, and its optimizers. A collective call where there are ranks.

    Raises ConfigError when the model can't do what `config` wants.
    """
    from accelerate import Accelerator, DistributedDataParallelKwargs

    model.train()
    check_trainable(model, config)
    if config.gradient_checkpointing:
        model.activation_checkpointing_enable()
    if config.compile:
        _compile(model)
    on_cpu = ranks is not None and not ranks.cuda
    accelerator = Accelerator(
        mixed_precision="bf16" if wants_bf16(config.precision, not on_cpu) else "no",
        cpu=on_cpu,
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)],
    )
    if ranks is None or not ranks.sharded:
        model.to(accelerator.device)
        prepared, *optimizers = accelerator.prepare(model, *build_optimizers(model, config))
        return accelerator, prepared, optimizers
    _shard(model, accelerator.device.type, ranks.world)
    check_rows(dict(model.named_parameters()))
    prepared = accelerator.prepare_model(model, evaluation_mode=True)  # autocast; it is on its devices already
    return accelerator, prepared, [accelerator.prepare_optimizer(one) for one in build_optimizers(model, config)]


def check_trainable(model: PreTrainedModel, config: TrainConfig) -> None:
    """Refuse what this model can't do. Raises ConfigError."""
    if config.gradient_checkpointing and not model.supports_gradient_checkpointing:
        raise ConfigError("train.gradient_checkpointing", True, f"{type(model).__name__} can't do it; false is needed")


def wants_bf16(precision: str, may_use_gpu: bool = True) -> bool:
    """Tell whether `precision` ("auto", "bf16" or "fp32") means bf16 autocast: "auto" where a CUDA device has it."""
    if precision == "auto":
        return may_use_gpu and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return precision == "bf16"


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The model's blocks: the members of its outermost lists of modules."""
    found: list[nn.Module] = []
    for child in model.children():
        found += child.children() if isinstance(child, nn.ModuleList) else _blocks(child)
    return found


def _compile(model: nn.Module) -> None:
    """Block by block: equal ones are compiled once, and gradients of one are averaged while others are computed."""
    import torch._inductor.config as inductor

    inductor.compile_threads = 1  # no processes that could outlive this one
    for block in _blocks(model) or [model]:
        block.compile()


def _shard(model: nn.Module, device: str, world: int) -> None:
    """Cut all parameters; those of one block at a time are whole while it is computed, the others' never."""
    mesh = init_device_mesh(device, (world,))
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
