"""Tiny targets, created inside the probe processes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

TOKENIZER = Path(__file__).parents[3] / "examples" / "tokenizer"
SIZE = {
    "vocab_size": 1024,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def _model(kind: str, **options: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZE), **options)


def _with_liger(model: Any, **flags: bool) -> Any:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model, **flags)
    return model


def llama() -> Any:
    return _with_liger(_model("llama"))


def llama_without() -> Any:
    return _model("llama")


def qwen3() -> Any:
    return _with_liger(_model("qwen3"), cross_entropy=True, fused_linear_cross_entropy=False)


def gpt2() -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("gpt2", vocab_size=1024, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    return _with_liger(AutoModelForCausalLM.from_config(config))


def eager() -> Any:
    return _model("llama", attn_implementation="eager")


def not_a_number() -> Any:
    """Liger's SwiGLU returns NaN."""
    model = _with_liger(_model("llama"))
    import liger_kernel.ops as ops

    plain = ops.LigerSiLUMulFunction.forward
    ops.LigerSiLUMulFunction.forward = staticmethod(lambda *a: plain(*a) * float("nan"))
    return model


def overflowing() -> Any:
    """A step whose loss is infinite."""
    import torch

    weight = torch.ones(1, requires_grad=True)
    return lambda: (weight * float("inf")).sum().backward()


def segfault() -> Any:
    import ctypes

    ctypes.string_at(0)


def hang() -> Any:
    import time

    time.sleep(10_000)


def adapters() -> Any:
    """LoRA, gradient checkpointing and bf16, without any trainer."""
    import peft
    import torch

    model = _model("llama", dtype=torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))


def hugging_face() -> Any:
    """transformers' own trainer; Liger is applied when it trains."""
    import datasets
    from transformers import Trainer, TrainingArguments

    rows = datasets.Dataset.from_list(
        [{"input_ids": [*range(i, i + 24)], "labels": [*range(i, i + 24)]} for i in range(20)]
    )
    options = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        use_cpu=True,
        report_to=[],
        per_device_train_batch_size=2,
        use_liger_kernel=True,
    )
    return Trainer(model=_model("llama"), args=options, train_dataset=rows)


def _sft(**options: Any) -> Any:
    import datasets
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    rows = [
        {"messages": [{"role": "user", "content": f"Say {i}"}, {"role": "assistant", "content": "word " * (3 + i % 7)}]}
        for i in range(24)
    ]
    shared = {"output_dir": tempfile.gettempdir(), "use_cpu": True, "bf16": False, "report_to": [], "max_length": 64}
    return SFTTrainer(
        model=_model("qwen2"),
        args=SFTConfig(**shared, per_device_train_batch_size=2, gradient_checkpointing=False, **options),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(TOKENIZER),
    )


def trl_packed() -> Any:
    return _sft(packing=True)


def trl_wrapped() -> Any:
    return _sft(packing=True, packing_strategy="wrapped")


def trl_dpo() -> Any:
    import datasets
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    rows = [
        {
            "prompt": [{"role": "user", "content": f"Say {i}"}],
            "chosen": [{"role": "assistant", "content": "yes " * (2 + i % 5)}],
            "rejected": [{"role": "assistant", "content": "no " * (1 + i % 5)}],
        }
        for i in range(8)
    ]
    shared = {"output_dir": tempfile.gettempdir(), "use_cpu": True, "bf16": False, "report_to": [], "max_length": 64}
    return DPOTrainer(
        model=_model("qwen2"),
        ref_model=_model("qwen2"),
        args=DPOConfig(**shared, per_device_train_batch_size=2, gradient_checkpointing=False, use_liger_kernel=True),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(TOKENIZER),
    )
