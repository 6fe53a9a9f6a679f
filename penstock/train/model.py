"""Loads or initialises the model with the configured precision, kernels and adapters.

If something isn't available, an `UnsupportedError` is raised; nothing is silently replaced by something slower or
different.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from blake3 import blake3

from penstock.errors import UnsupportedError
from penstock.train.config import LigerConfig, LoraConfig, ModelConfig, Precision, TrainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LIGER_KERNELS = {"rms_norm": ("rms_norm",), "rope": ("rope",), "mlp": ("swiglu", "geglu")}


class Dtypes(NamedTuple):
    """The dtype of the weights, and that of computation if it differs."""

    weights: torch.dtype
    autocast: torch.dtype | None


def dtypes_of(precision: Precision, device: torch.device) -> Dtypes:
    """The dtypes of a precision on a device."""
    match precision:
        case Precision.FP32:
            return Dtypes(torch.float32, None)
        case Precision.BF16_MIXED:
            _need_bf16(precision, device)
            return Dtypes(torch.float32, torch.bfloat16)
        case Precision.BF16:
            _need_bf16(precision, device)
            return Dtypes(torch.bfloat16, None)
        case Precision.AUTO:
            mixed = device.type == "cuda" and torch.cuda.is_bf16_supported()
            return dtypes_of(Precision.BF16_MIXED if mixed else Precision.FP32, device)


def _need_bf16(precision: Precision, device: torch.device) -> None:
    if device.type == "cuda" and not torch.cuda.is_bf16_supported():
        name = torch.cuda.get_device_name(device)
        raise UnsupportedError(f"model.precision={precision}: {name} does not support bf16. Use model.precision=fp32.")


def load_model(config: TrainConfig, device: torch.device, *, fuse_loss: bool) -> PreTrainedModel:
    """Loads the model on the CPU, without adapters; random weights depend on torch's seed.

    `fuse_loss`: if Liger is enabled, the model's forward pass computes the SFT loss with Liger's fused kernel.
    """
    chosen = config.model
    attention = None if chosen.attention == "auto" else chosen.attention
    dtype = dtypes_of(chosen.precision, device).weights
    try:
        model = _initialised(chosen, attention, dtype) if chosen.init else _loaded(chosen, attention, dtype)
    except (OSError, ValueError, ImportError) as error:
        asked = f"model.attention={chosen.attention}" if attention else f"model {chosen.path or chosen.init}"
        raise UnsupportedError(f"{asked}: rejected by transformers: {error}") from error
    model.config.use_cache = False  # a cache would break the isolation of packed sequences
    if chosen.gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise UnsupportedError(
                f"model.gradient_checkpointing: not supported by {type(model).__name__}. Turn it off."
            )
        _enable_checkpointing(model)
    if config.liger.enabled:
        _apply_liger(model, config.liger, device, fuse_loss)
    return model


def _enable_checkpointing(model: Any) -> None:
    """Turns checkpointing on, by its name in this release of transformers."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable()
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})


def _initialised(config: ModelConfig, attention: str | None, dtype: torch.dtype) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        AutoConfig.from_pretrained(str(config.init), trust_remote_code=False),
        attn_implementation=attention,
        dtype=dtype,
        trust_remote_code=False,  # the default would prompt on standard input
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
    """A digest of the architecture and the weights, independent of where they were loaded from."""
    hasher = blake3(max_threads=blake3.AUTO)
    hasher.update(model.config.to_json_string(use_diff=False).encode())
    for name, tensor in sorted(model.state_dict().items()):
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        hasher.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return f"b3-{hasher.hexdigest()}"


def check_liger(device: torch.device) -> None:
    """Raises an error if Liger's layer kernels can't be imported or run."""
    try:
        import liger_kernel.transformers
    except ImportError as error:
        raise UnsupportedError(
            f"liger.enabled: Liger's kernels can't be imported ({error}). "
            "Install penstock[liger], or set liger.enabled=false."
        ) from error
    del liger_kernel
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UnsupportedError("liger.enabled: Liger's kernels need a GPU, and there is none. Set liger.enabled=false.")


def _apply_liger(model: PreTrainedModel, config: LigerConfig, device: torch.device, fuse_loss: bool) -> None:
    enabled = {kernel: getattr(config, name) for name, kernels in LIGER_KERNELS.items() for kernel in kernels}
    if not any(enabled.values()) and not config.fused_loss:
        raise UnsupportedError(
            "liger.enabled is set, but all of its kernels are off. Turn one on, or set liger.enabled=false."
        )
    enabled["fused_linear_cross_entropy"] = config.fused_loss and fuse_loss
    if not any(enabled.values()):
        return  # DPO's fused loss is not part of the model
    check_liger(device)
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance

    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UnsupportedError(
            f"liger.enabled: Liger has no kernels for models of type {kind!r}. Set liger.enabled=false."
        )
    _apply_liger_kernel_to_instance(model=model, cross_entropy=False, **enabled)


def add_adapters(model: PreTrainedModel, config: LoraConfig) -> torch.nn.Module:
    """Adds low-rank adapters to a model and freezes everything else."""
    try:
        import peft
    except ImportError as error:
        raise UnsupportedError(
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
        raise UnsupportedError(f"lora.targets={list(config.targets)}: {error}") from error


def embeddings(model: Any) -> int:
    """The number of token embeddings of a model."""
    return int(model.get_input_embeddings().weight.shape[0])


def check_fits(model: PreTrainedModel, vocabulary: int, longest: int) -> None:
    """Raises an error if the model lacks embeddings for some ids or positions of the data."""
    size = embeddings(model)
    if vocabulary > size:
        raise UnsupportedError(
            f"the tokenizer has {vocabulary} tokens but the model only {size} embeddings. "
            "Use the model's own tokenizer, or resize its embeddings first."
        )
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and longest > positions:
        raise UnsupportedError(
            f"the longest sequence has {longest} tokens but the model only {positions} positions. "
            f"Set view.max_length to {positions} or less."
        )


def forward_inputs(model: PreTrainedModel, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a batch that the model's forward accepts, without labels and loss masks."""
    ours = {"labels", "loss_weights", "completion_mask"}
    parameters = inspect.signature(type(model).forward).parameters.values()
    has_kwargs = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in tensors.items() if name not in ours and (has_kwargs or name in names)}
