"""The model: loaded or made with random weights, in the precision, with the kernels and adapters asked for.

What can't be had is a `PromiseError`: nothing is replaced silently by something slower or different.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from blake3 import blake3

from penstock.train.config import LigerConfig, LoraConfig, ModelConfig, Precision, TrainConfig
from penstock.train.errors import PromiseError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LIGER_KERNELS = {"rms_norm": ("rms_norm",), "rope": ("rope",), "mlp": ("swiglu", "geglu")}


class Numbers(NamedTuple):
    """In which type weights are kept, and in which the model computes where that differs."""

    weights: torch.dtype
    autocast: torch.dtype | None


def numbers(precision: Precision, device: torch.device) -> Numbers:
    """The types that a precision means on a device."""
    match precision:
        case Precision.FP32:
            return Numbers(torch.float32, None)
        case Precision.BF16_MIXED:
            _need_bf16(precision, device)
            return Numbers(torch.float32, torch.bfloat16)
        case Precision.BF16:
            _need_bf16(precision, device)
            return Numbers(torch.bfloat16, None)
        case Precision.AUTO:
            mixed = device.type == "cuda" and torch.cuda.is_bf16_supported()
            return numbers(Precision.BF16_MIXED if mixed else Precision.FP32, device)


def _need_bf16(precision: Precision, device: torch.device) -> None:
    if device.type == "cuda" and not torch.cuda.is_bf16_supported():
        name = torch.cuda.get_device_name(device)
        raise PromiseError(f"model.precision={precision}: {name} has no bf16. Use model.precision=fp32.")


def load_model(config: TrainConfig, device: torch.device, *, fuse_loss: bool) -> PreTrainedModel:
    """The model, on the CPU, without adapters; random weights come from torch's seed.

    `fuse_loss`: its forward computes the loss of supervised fine-tuning by Liger, if Liger is asked for.
    """
    chosen = config.model
    attention = None if chosen.attention == "auto" else chosen.attention
    dtype = numbers(chosen.precision, device).weights
    try:
        model = _made(chosen, attention, dtype) if chosen.init else _loaded(chosen, attention, dtype)
    except (OSError, ValueError, ImportError) as error:
        asked = f"model.attention={chosen.attention}" if attention else f"model {chosen.path or chosen.init}"
        raise PromiseError(f"{asked}: transformers refuses it: {error}") from error
    model.config.use_cache = False  # a cache would undo the isolation of packed sequences
    if chosen.gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise PromiseError(f"model.gradient_checkpointing: {type(model).__name__} has none. Turn it off.")
        enable: Any = model.gradient_checkpointing_enable  # untyped in some releases
        enable({"use_reentrant": False})
    if config.liger.enabled:
        _apply_liger(model, config.liger, device, fuse_loss)
    return model


def _made(config: ModelConfig, attention: str | None, dtype: torch.dtype) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        AutoConfig.from_pretrained(str(config.init), trust_remote_code=False),
        attn_implementation=attention,
        dtype=dtype,
        trust_remote_code=False,  # left out, it would be asked for on standard input
    )
    return model


def _loaded(config: ModelConfig, attention: str | None, dtype: torch.dtype) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        str(config.path),
        revision=config.revision,
        attn_implementation=attention,
        dtype=dtype,
        trust_remote_code=False,
    )
    return model


def weights_digest(model: PreTrainedModel) -> str:
    """A name for the architecture and the weights themselves, wherever they were loaded from."""
    hasher = blake3(max_threads=blake3.AUTO)
    hasher.update(model.config.to_json_string(use_diff=False).encode())
    for name, tensor in sorted(model.state_dict().items()):
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        hasher.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return f"b3-{hasher.hexdigest()}"


def check_liger(device: torch.device) -> None:
    """Refuse Liger's layer kernels where they can't be imported or run."""
    try:
        import liger_kernel.transformers
    except ImportError as error:
        raise PromiseError(
            f"liger.enabled: Liger's kernels can't be imported ({error}). "
            "Install penstock[liger], or set liger.enabled=false."
        ) from error
    del liger_kernel
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise PromiseError("liger.enabled: Liger's kernels need a GPU, and there is none. Set liger.enabled=false.")


def _apply_liger(model: PreTrainedModel, config: LigerConfig, device: torch.device, fuse_loss: bool) -> None:
    wanted = {kernel: getattr(config, name) for name, kernels in LIGER_KERNELS.items() for kernel in kernels}
    if not any(wanted.values()) and not config.fused_loss:
        raise PromiseError(
            "liger.enabled, and every kernel of it is turned off. Turn one on, or set liger.enabled=false."
        )
    wanted["fused_linear_cross_entropy"] = config.fused_loss and fuse_loss
    if not any(wanted.values()):
        return  # DPO's fused loss is no part of the model
    check_liger(device)
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance

    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise PromiseError(f"liger.enabled: Liger has no kernels for models of type {kind!r}. Set liger.enabled=false.")
    _apply_liger_kernel_to_instance(model=model, cross_entropy=False, **wanted)


def add_adapters(model: PreTrainedModel, config: LoraConfig) -> torch.nn.Module:
    """The model with low-rank adapters, which alone are trained."""
    try:
        import peft
    except ImportError as error:
        raise PromiseError(
            f"lora.rank={config.rank}: peft can't be imported ({error}). Install penstock[train]."
        ) from error

    targets = config.targets[0] if config.targets == ("all-linear",) else list(config.targets)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=2 * config.rank if config.alpha is None else config.alpha,  # type: ignore[arg-type]
        lora_dropout=config.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    try:
        return peft.get_peft_model(model, settings)
    except ValueError as error:
        raise PromiseError(f"lora.targets={list(config.targets)}: {error}") from error


def embeddings(model: Any) -> int:
    """How many tokens a model knows."""
    return int(model.get_input_embeddings().weight.shape[0])


def check_fits(model: PreTrainedModel, vocabulary: int, longest: int) -> None:
    """Refuse data whose ids or positions the model does not have."""
    size = embeddings(model)
    if vocabulary > size:
        raise PromiseError(
            f"the tokenizer has {vocabulary} tokens and the model embeddings for {size}: some ids would not exist. "
            "Use the model's own tokenizer, or resize its embeddings first."
        )
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and longest > positions:
        raise PromiseError(
            f"the longest sequence has {longest} tokens and the model has {positions} positions. "
            f"Set data.max_length={positions}, or less."
        )


def accepted(model: PreTrainedModel, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs among a batch's tensors: those that the model's forward takes, without labels and masks of ours."""
    ours = {"labels", "loss_weights", "completion_mask"}
    parameters = inspect.signature(type(model).forward).parameters.values()
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in tensors.items() if name not in ours and (takes_all or name in names)}
