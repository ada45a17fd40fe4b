"""An adapter of PEFT on a model that transformers has split by its plan of tensor parallelism."""

import torch.distributed as dist
from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers.distributed import DistributedConfig

import schedlang

world = 2


def program(model):
    adapter = get_peft_model_state_dict(model)
    config, base = model.peft_config["default"], model.unload()
    split = type(base).from_pretrained(
        None,
        config=base.config,
        state_dict=base.state_dict(),
        dtype=base.dtype,
        distributed_config=DistributedConfig(tp_size=dist.get_world_size()),
    )
    for dst, src in zip(split.buffers(), base.buffers(), strict=True):
        dst.copy_(src)  # rotary frequencies are computed anew, here in float64
    adapted = get_peft_model(split, config)
    set_peft_model_state_dict(adapted, adapter)

    def step(batch):
        loss = adapted(**batch).loss
        loss.backward()
        return loss

    return schedlang.TrainingProgram(adapted, step)
